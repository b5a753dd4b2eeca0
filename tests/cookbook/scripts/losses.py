"""The losses that tutorial 202 shows, on data the cookbook makes: prints what the server answered for each, with the gradient's norm."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import tinker
import torch
from tinker_cookbook import renderers
from tinker_cookbook.completers import TinkerTokenCompleter
from tinker_cookbook.supervised.data import conversation_to_datum
from tinker_cookbook.tokenizer_utils import get_tokenizer

MODEL = "Qwen/Qwen3.5-4B"
RATIO = ["importance_sampling", "ppo", "cispo", "gspo", "stable_reinforce"]


def squared(logprobs, weights):
    loss = (weights * logprobs**2).sum()
    return loss, {"custom/squared:sum": loss}


def squared_here(data, logprobs):
    losses = [(datum.loss_fn_inputs["weights"].to_torch() * p**2).sum() for datum, p in zip(data, logprobs, strict=True)]
    return torch.stack(losses).sum(), {}


def likelihood_here(data, logprobs):
    losses = [-(datum.loss_fn_inputs["weights"].to_torch() * p).sum() for datum, p in zip(data, logprobs, strict=True)]
    return torch.stack(losses).sum(), {}


async def main() -> dict:
    tokenizer = get_tokenizer(MODEL)
    renderer = renderers.get_renderer("qwen3_5_disable_thinking", tokenizer)
    service = tinker.ServiceClient()
    training = await service.create_lora_training_client(MODEL, rank=4, seed=3)
    said = [{"role": "user", "content": "What is 20 + 3?"}, {"role": "assistant", "content": "23"}]
    datum = conversation_to_datum(said, renderer, 256, renderers.TrainOnWhat.ALL_ASSISTANT_MESSAGES)
    # Both LoRA matrices away from zero, so that both have gradients.
    training.forward_backward([datum], "cross_entropy")
    await training.optim_step(tinker.AdamParams(learning_rate=1e-2))
    sampler = await training.save_weights_and_get_sampling_client(record_stability_info=True)

    async def norm(future: tinker.APIFuture) -> dict:
        update = training.optim_step(tinker.AdamParams(learning_rate=0.0))
        output = await future
        told = {"loss": output.metrics["loss:sum"], "grad_norm": (await update).metrics["grad_norm"], "metrics": output.metrics}
        return told | {"logprobs": [item["logprobs"].to_torch().tolist() for item in output.loss_fn_outputs]}

    answers = {
        "cross_entropy": await norm(training.forward_backward([datum], "cross_entropy")),
        "likelihood_here": await norm(training.forward_backward_custom([datum], likelihood_here)),
        "squared_here": await norm(training.forward_backward_custom([datum], squared_here)),
    }
    answers["cross_entropy"]["weights"] = datum.loss_fn_inputs["weights"].tolist()
    handle = await service.create_custom_loss(squared, {"logprobs": 1, "weights": 1})
    answers["squared_there"] = await norm(training.forward_backward_custom([datum], handle))

    prompt = renderer.build_generation_prompt(said[:1])
    completer = TinkerTokenCompleter(sampler, max_tokens=6)
    sampled = [await completer(prompt, renderer.get_stop_sequences()) for _ in range(3)]
    random = np.random.default_rng(0)

    def datums(shift: float, name: str, weighted: bool = False) -> list[tinker.Datum]:
        """The samples with logprobs moved by up to ``shift``; advantages 1.5, -0.5 and 0.25."""
        made = []
        for item, advantage in zip(sampled, [1.5, -0.5, 0.25], strict=True):
            before, count = prompt.length - 1, len(item.tokens)
            q = np.array(item.logprobs, np.float32) + random.uniform(-shift, shift, count).astype(np.float32)
            advantages = [0.0] * before + [advantage] * count
            inputs = {"target_tokens": [0] * before + list(item.tokens)}
            if weighted:
                inputs["weights"] = advantages
            else:
                inputs |= {"logprobs": [0.0] * before + q.tolist(), "advantages": advantages}
            if name == "gspo":
                inputs["sequence_ratio_mask"] = [0.0] * before + [1.0] * count
            one = tinker.Datum(model_input=prompt.append(tinker.EncodedTextChunk(tokens=item.tokens[:-1])), loss_fn_inputs=inputs)
            if name == "stable_reinforce":
                whose = {"sequence_id": item.sequence_id}
                one = one.with_provenance(
                    model_input=[
                        tinker.types.PromptProvenanceSpan(**whose, length=prompt.length),
                        tinker.types.SampledProvenanceSpan(**whose, length=count - 1),
                    ],
                    loss_fn_inputs=[
                        tinker.types.PromptProvenanceSpan(**whose, offset=1, length=before),
                        tinker.types.SampledProvenanceSpan(**whose, length=count),
                    ],
                )
            made.append(one)
        return made

    answers["weighted"] = await norm(training.forward_backward(datums(0, "", weighted=True), "cross_entropy"))
    clip = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
    configs = {"ppo": clip, "gspo": clip}
    for name in RATIO:
        answers[name] = await norm(training.forward_backward(datums(0, name), name))
        off = datums(0.5, name)
        told = await norm(training.forward_backward(off, name, configs.get(name)))
        told["inputs"] = [{key: one.loss_fn_inputs[key].tolist() for key in ("logprobs", "advantages")} for one in off]
        answers[f"{name}_off_policy"] = told
    return answers


print(json.dumps(asyncio.run(main())))
