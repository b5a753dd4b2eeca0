"""Activation checkpointing: the same bits, on request or when a micro-batch would not fit its budget."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from spindle.compute.model import BaseModel
from spindle.compute.worker import DeviceWorker
from spindle.types import LoraConfig
from tests.compute.helpers import Request, pack, random_adapter, random_item
from tests.tiny import tiny_gemma3, tiny_llama, tiny_qwen3_moe


@pytest.mark.parametrize("build", [tiny_llama, tiny_gemma3, tiny_qwen3_moe])
def test_the_same_bits(build):
    base = BaseModel.load(build())
    worker = DeviceWorker(base)
    adapters = [random_adapter(base, LoraConfig(rank=r)) for r in (4, 2)]
    rng = np.random.default_rng(0)
    batch = pack([Request(a, [random_item(rng, 40), random_item(rng, 5)]) for a in adapters])
    plain = worker.run(batch)
    for budget in (0, None):  # on, and off again
        worker.activation_budget = budget
        for got, want in zip(worker.run(batch), plain, strict=True):
            assert torch.equal(got.grad, want.grad) and torch.equal(got.logprobs, want.logprobs)


def test_the_budget_decides():
    base = BaseModel.load(tiny_llama(num_hidden_layers=6))
    adapter = random_adapter(base, LoraConfig(rank=4))
    rng = np.random.default_rng(0)
    worker = DeviceWorker(base, activation_budget=100 * base.activation_bytes)
    kept = {}
    for rows in (100, 101):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, to=saved: to.append(x) or x, lambda x: x):
            worker.run(pack([Request(adapter, [random_item(rng, rows)])]))
        kept[rows] = sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in saved if not x.requires_grad}.values())
        gc.collect()
    assert kept[101] < 0.5 * kept[100]
