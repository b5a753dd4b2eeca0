"""Train, save, download with the cookbook's weights module, make a PEFT adapter and a merged model: prints the server's own scores."""

from __future__ import annotations

import json

import tinker
from tinker_cookbook import renderers, weights
from tinker_cookbook.supervised.data import conversation_to_datum
from tinker_cookbook.tokenizer_utils import get_tokenizer

MODEL = "Qwen/Qwen3.5-4B"

renderer = renderers.get_renderer("qwen3_5_disable_thinking", get_tokenizer(MODEL))
training = tinker.ServiceClient().create_lora_training_client(MODEL, rank=4, seed=5).result()
said = [{"role": "user", "content": "Which way is the wool?"}, {"role": "assistant", "content": "North."}]
datum = conversation_to_datum(said, renderer, 256, renderers.TrainOnWhat.ALL_ASSISTANT_MESSAGES)
for _ in range(3):
    training.forward_backward([datum], "cross_entropy")
    training.optim_step(tinker.AdamParams(learning_rate=3e-3)).result()
path = training.save_state("exported").result().path
weights.download(tinker_path=path, output_dir="exported/tinker")
weights.build_lora_adapter(base_model="model", adapter_path="exported/tinker", output_path="exported/peft")
weights.build_hf_model(base_model="model", adapter_path="exported/tinker", output_path="exported/merged", dtype="float32")
sampler = training.save_weights_and_get_sampling_client().result()
print(json.dumps({"tokens": datum.model_input.to_ints(), "scored": sampler.compute_logprobs(datum.model_input).result()[1:], "path": path}))
