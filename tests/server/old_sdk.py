"""A training script of its day, run by ``test_old_sdk.py`` under an old SDK. Arguments: URL, base model; prints its figures as JSON."""

from __future__ import annotations

import json
import sys

import numpy as np
import tinker
import torch
from tinker import types

VOCAB = 2048


def datum(length: int, seed: int = 0) -> types.Datum:
    tokens = np.random.default_rng(seed).integers(2, VOCAB, length + 1)
    inputs = {"target_tokens": tokens[1:].tolist(), "weights": [1.0] * length}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1].tolist()), loss_fn_inputs=inputs)


def sparse(length: int = 40) -> types.Datum:
    targets, weights = torch.zeros(length, 5, dtype=torch.int64), torch.zeros(length, 5)
    targets[17], weights[17] = torch.arange(5, 10), 0.2
    tokens = np.random.default_rng(1).integers(2, VOCAB, length).tolist()
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs={"target_tokens": targets, "weights": weights})


def main(url: str, base_model: str) -> dict:
    service = tinker.ServiceClient(base_url=url, api_key="tml-old-key")
    training = service.create_lora_training_client(base_model, rank=4, seed=1)
    data, losses = [datum(12), datum(5, 1)], []
    for _ in range(4):
        forward_backward = training.forward_backward(data, "cross_entropy")
        step = training.optim_step(types.AdamParams(learning_rate=1e-2))
        losses.append(forward_backward.result().metrics["loss:sum"])
        step.result()
    shape = training.forward([sparse()], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].shape
    path = training.save_state("old").result().path
    resumed = service.create_training_client_from_state_with_optimizer(path)
    same = [client.forward(data, "cross_entropy").result().metrics["loss:sum"] for client in (training, resumed)]
    sampler = training.save_weights_and_get_sampling_client(name="x")
    prompt = types.ModelInput.from_ints([5, 6, 7])
    greedy = sampler.sample(prompt, num_samples=2, sampling_params=types.SamplingParams(max_tokens=4, temperature=0.0)).result()
    scored = sampler.compute_logprobs(prompt).result()
    named = training.save_weights_for_sampler("named").result().path
    again = service.create_sampling_client(model_path=named).compute_logprobs(prompt).result()
    try:
        training.forward([datum(3)], "nothing").result()
        error = ""
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"
    rest = service.create_rest_client()
    archive = rest.get_checkpoint_archive_url_from_tinker_path(path).result().url
    return {
        "version": tinker.__version__,
        "losses": losses,
        "shape": list(shape),
        "same": same,
        "greedy": [list(sequence.tokens) for sequence in greedy.sequences],
        "scored": [scored, again],
        "error": error,
        "archive": archive,
        "runs": [run.training_run_id for run in rest.list_training_runs().result().training_runs],
        "model_id": training.get_info().model_id,
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
