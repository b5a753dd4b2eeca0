"""Neighbours cannot be felt: the same bits whatever else is in the micro-batch (CPU float32)."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from spindle.compute.lora import MIN_ROWS
from spindle.compute.model import BaseModel
from spindle.compute.worker import DeviceWorker
from spindle.types import AdamParams, LoraConfig
from tests.compute.helpers import Request, pack, random_adapter, random_item
from tests.tiny import tiny_gemma3, tiny_llama, tiny_phi3, tiny_qwen3, tiny_qwen3_moe


@pytest.fixture(scope="module")
def worker():
    return DeviceWorker(BaseModel.load(tiny_qwen3()))


@pytest.mark.parametrize(("inner", "outer"), [(64, 64), (64, 2048), (2048, 64), (512, 512), (4, 64), (64, 4), (16, 96)])
def test_a_row_of_a_product_keeps_its_bits(inner, outer):
    """What all of this rests on; if it fails on a machine, MIN_ROWS is too small there."""
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(300, inner, generator=generator), torch.randn(outer, inner, generator=generator)
    whole, whole_t = x @ w.t(), x @ w.t().contiguous()
    for rows in (MIN_ROWS, MIN_ROWS + 1, 23, 64, 129, 257):
        for start in (0, 1, 40):
            assert torch.equal(x[start : start + rows] @ w.t(), whole[start : start + rows])
            assert torch.equal(x[start : start + rows] @ w.t().contiguous(), whole_t[start : start + rows])


def train(worker, steps: int, neighbours: int, seed: int = 0):
    """An adapter after ``steps`` on data of its own, among others on random data, ranks, losses and places in the batch."""
    own_rng, rng = np.random.default_rng(seed), np.random.default_rng(neighbours)
    adapter = random_adapter(worker.model, LoraConfig(rank=4))
    others = [random_adapter(worker.model, LoraConfig(rank=int(r)), seed=9) for r in rng.choice([2, 4, 8, 16], neighbours)]
    logprobs = []
    for _ in range(steps):
        items = [random_item(own_rng, int(n)) for n in own_rng.integers(1, 40, 3)]
        requests = [Request(o, [random_item(rng, int(rng.integers(1, 60)))], backward=bool(rng.random() < 0.8)) for o in others]
        at = int(rng.integers(0, neighbours + 1))
        result = worker.run(pack([*requests[:at], Request(adapter, items), *requests[at:]]))[at]
        logprobs.append(result.logprobs)
        worker.accumulate(adapter, result.grad)
        worker.optim_step([adapter], AdamParams(learning_rate=1e-3))
    return adapter, torch.cat(logprobs)


def assert_same_bits(worker, steps: int, neighbours: int) -> None:
    (alone, p), (mixed, q) = train(worker, steps, 0), train(worker, steps, neighbours)
    assert torch.equal(p, q)
    for name in ("params", "exp_avg", "exp_avg_sq"):
        assert torch.equal(getattr(alone, name), getattr(mixed, name)), name


@pytest.mark.slow
def test_twenty_steps_alone_and_among_31_others(worker):
    assert_same_bits(worker, 20, 31)


@pytest.mark.parametrize("build", [tiny_llama, tiny_gemma3, tiny_phi3, tiny_qwen3_moe])
def test_other_families(build):
    assert_same_bits(DeviceWorker(BaseModel.load(build())), 3, 6)


def test_one_flipped_token(worker):
    rng = np.random.default_rng(1)
    a, b = (random_adapter(worker.model, LoraConfig(rank=4), seed) for seed in (0, 1))
    mine, theirs = [random_item(rng, 30)], [random_item(rng, 20)]
    before = worker.run(pack([Request(b, theirs), Request(a, mine)]))[1]
    theirs[0].tokens[5] ^= 1
    after = worker.run(pack([Request(b, theirs), Request(a, mine)]))[1]
    assert torch.equal(before.logprobs, after.logprobs) and torch.equal(before.grad, after.grad)
    mine[0].tokens[5] ^= 1
    changed = worker.run(pack([Request(b, theirs), Request(a, mine)]))[1]
    assert not torch.equal(before.logprobs, changed.logprobs) and not torch.equal(before.grad, changed.grad)


@pytest.mark.parametrize("n", [1, 3, 17, 100])
def test_identical_datums_get_identical_logprobs(worker, n):
    adapter = random_adapter(worker.model, LoraConfig(rank=4))
    item = random_item(np.random.default_rng(n), n)
    p = worker.run(pack([Request(adapter, [copy.deepcopy(item) for _ in range(4)])]))[0].logprobs.view(4, n)
    assert all(torch.equal(p[0], row) for row in p)


def test_any_micro_batch_gives_the_same_gradient(worker):
    rng = np.random.default_rng(2)
    adapter = random_adapter(worker.model, LoraConfig(rank=4))
    items = [random_item(rng, n) for n in (7, 2, 5, 3)]
    norms = []
    for size in (1, 2, 4):
        total = sum(worker.run(pack([Request(adapter, items[i : i + size])]))[0].grad for i in range(0, 4, size))
        norms.append(total.norm().item())
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-6)
