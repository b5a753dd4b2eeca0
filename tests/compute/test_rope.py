"""Scaled rotary embeddings: equal to transformers, no neighbour felt, in every kind that transformers knows."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

import spindle
from spindle.compute.model import BaseModel
from spindle.compute.worker import DeviceWorker
from spindle.errors import InvalidRequest
from spindle.types import LoraConfig
from tests.compute.helpers import Oracle, Request, pack, random_adapter, random_item
from tests.tiny import tiny_gemma3, tiny_llama, tiny_phi3

THETA = {"rope_theta": 10000.0}
LONGROPE = {**THETA, "rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
MODELS = {
    "linear": lambda: tiny_llama(rope_parameters={**THETA, "rope_type": "linear", "factor": 4.0}),
    "dynamic": lambda: tiny_llama(rope_parameters={**THETA, "rope_type": "dynamic", "factor": 4.0}, max_position_embeddings=256),
    "yarn": lambda: tiny_llama(
        rope_parameters={**THETA, "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
    ),
    "llama3": lambda: tiny_llama(
        rope_parameters={
            **THETA,
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    ),
    "longrope": lambda: tiny_phi3(rope_parameters=LONGROPE, original_max_position_embeddings=64),
    "by layer": lambda: tiny_gemma3(
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        }
    ),
}


@pytest.mark.parametrize("kind", MODELS)
def test_scaled_positions(kind):
    model = MODELS[kind]()
    worker = DeviceWorker(BaseModel.load(copy.deepcopy(model)))
    longest = worker.model.max_context
    assert longest == {"longrope": 64, "dynamic": 256}.get(kind, 512)
    adapter = random_adapter(worker.model, LoraConfig(rank=4))
    rng = np.random.default_rng(0)
    mine, other = [random_item(rng, 30), random_item(rng, longest)], [random_item(rng, longest), random_item(rng, 3)]
    alone = worker.run(pack([Request(adapter, mine)]))[0]
    mixed = worker.run(pack([Request(adapter, other), Request(adapter, mine)]))[1]
    assert torch.equal(alone.logprobs, mixed.logprobs) and torch.equal(alone.grad, mixed.grad)
    oracle = Oracle(model, adapter)
    want = [oracle.logprobs(item) for item in mine]
    sum(-(torch.from_numpy(item.inputs["weights"]) * p).sum() for item, p in zip(mine, want, strict=True)).backward()
    assert (alone.logprobs - torch.cat(want)).abs().max() <= 1e-4
    oracle.assert_grads(alone.grad, 1e-4)


def test_longrope_past_its_first_context_is_refused():
    with spindle.Engine(BaseModel.load(MODELS["longrope"]())) as engine:
        adapter = engine.create_adapter(rank=4, seed=1)
        tokens = np.arange(65)
        with pytest.raises(InvalidRequest, match="64"):
            adapter.forward([spindle.Datum(tokens, {"target_tokens": tokens})]).result(60)
