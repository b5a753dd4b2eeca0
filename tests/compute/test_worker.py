"""Logprobs and gradients against transformers and peft; adapters of several ranks in one micro-batch."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from spindle.compute.adapter import Adapter
from spindle.compute.model import BaseModel
from spindle.compute.worker import DeviceWorker
from spindle.types import AdamParams, LoraConfig
from tests.compute.helpers import Item, Oracle, Request, pack, random_adapter, random_item
from tests.tiny import tiny_gemma3, tiny_llama, tiny_mistral, tiny_phi3, tiny_qwen3, tiny_qwen3_moe

ROPE = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MODELS = {
    "llama": lambda: tiny_llama(),
    "llama_tied": lambda: tiny_llama(tied=True),
    "llama_rope_scaled": lambda: tiny_llama(rope_parameters={**ROPE, "original_max_position_embeddings": 64}),
    "qwen3": lambda: tiny_qwen3(),
    "qwen3_tied": lambda: tiny_qwen3(tied=True),
    "mistral_sliding": tiny_mistral,
    "phi3_fused": tiny_phi3,
    "gemma3": tiny_gemma3,
    "qwen3_moe": tiny_qwen3_moe,
}


@pytest.fixture(scope="module", params=MODELS)
def pair(request):
    """(untouched transformers model, worker over a copy of it)"""
    model = MODELS[request.param]()
    return model, DeviceWorker(BaseModel.load(copy.deepcopy(model)))


def test_logprobs_equal_transformers_alone_and_packed(pair):
    model, worker = pair
    rng = np.random.default_rng(0)
    adapter = Adapter(worker.model.layout(LoraConfig(rank=4))).init(0)  # B is zero: the base model
    items = [random_item(rng, n, k) for n, k in ((1, 0), (5, 0), (80, 0), (80, 3), (33, 0), (2, 21))]
    alone = [worker.run(pack([Request(adapter, [i], backward=False)]))[0].logprobs for i in items]
    packed = worker.run(pack([Request(adapter, items, backward=False)]))[0].logprobs
    at = 0
    for item, got in zip(items, alone, strict=True):
        logits = model(input_ids=torch.from_numpy(item.tokens)[None]).logits[0].detach()
        want = torch.log_softmax(logits, -1).gather(1, torch.from_numpy(item.targets).view(len(item.tokens), -1)).reshape(-1)
        assert (got - want).abs().max() <= 1e-5
        assert torch.equal(got, packed[at : at + item.targets.size])
        at += item.targets.size


@pytest.mark.parametrize("lora", [LoraConfig(rank=4), LoraConfig(rank=8, alpha=16, train_mlp=False), LoraConfig(rank=2, train_attn=False)])
def test_gradients_equal_peft_in_float64(pair, lora):
    model, worker = pair
    rng = np.random.default_rng(1)
    adapter = random_adapter(worker.model, lora)
    items = [random_item(rng, n, k) for n, k in ((7, 0), (40, 2), (90, 0))]
    result = worker.run(pack([Request(adapter, items)]))[0]
    oracle = Oracle(model, adapter)
    loss = sum(-(torch.from_numpy(i.inputs["weights"]) * oracle.logprobs(i)).sum() for i in items)
    loss.backward()
    oracle.assert_grads(result.grad)
    assert result.metrics["loss:sum"] == pytest.approx(loss.item(), rel=1e-5)
    want = torch.cat([oracle.logprobs(i).reshape(-1) for i in items])
    assert (result.logprobs - want).abs().max() <= 1e-5


def test_only_the_unembedding(pair):
    model, worker = pair
    adapter = random_adapter(worker.model, LoraConfig(rank=4, train_attn=False, train_mlp=False))
    assert adapter.layout.target_modules == ("lm_head",)
    item = random_item(np.random.default_rng(2), 30)
    result = worker.run(pack([Request(adapter, [item])]))[0]
    oracle = Oracle(model, adapter)
    (-(torch.from_numpy(item.inputs["weights"]) * oracle.logprobs(item)).sum()).backward()
    oracle.assert_grads(result.grad)


def test_two_ranks_mixed_equal_the_same_two_alone(pair):
    _, worker = pair
    rng = np.random.default_rng(3)
    batches = [[random_item(rng, n) for n in rng.integers(1, 60, 3)] for _ in range(10)]
    finals = []
    for mixed in (False, True):
        adapters = [random_adapter(worker.model, LoraConfig(rank=rank), seed=rank) for rank in (4, 16)]
        for items in batches:
            requests = [Request(a, items) for a in adapters]
            for batch in [pack(requests)] if mixed else [pack([r]) for r in requests]:
                for result in worker.run(batch):
                    worker.accumulate(result.segment.adapter, result.grad)
            for a in adapters:
                worker.optim_step([a], AdamParams(learning_rate=1e-3))
        finals.append([a.params for a in adapters])
    for alone, mixed in zip(*finals, strict=True):
        assert torch.equal(alone, mixed)


@pytest.mark.parametrize("factor", [10.0, -1.0, 0.0])
def test_weights_scale_the_gradient(factor):
    worker = DeviceWorker(BaseModel.load(tiny_llama()))
    adapter = random_adapter(worker.model, LoraConfig(rank=4))
    item = random_item(np.random.default_rng(4), 20)
    scaled = Item(item.tokens, item.targets, {"weights": item.inputs["weights"] * np.float32(factor)})
    one, other = (worker.run(pack([Request(adapter, [i])]))[0] for i in (item, scaled))
    assert (other.grad - factor * one.grad).norm() <= 1e-5 * abs(factor) * one.grad.norm()
    assert other.metrics["loss:sum"] == pytest.approx(factor * one.metrics["loss:sum"], rel=1e-5)


def test_the_same_datum_twice_doubles_and_zero_weights_add_nothing():
    worker = DeviceWorker(BaseModel.load(tiny_llama()))
    adapter = random_adapter(worker.model, LoraConfig(rank=4))
    item = random_item(np.random.default_rng(5), 20)
    silent = Item(item.tokens, item.targets, {"weights": np.zeros(20, np.float32)})
    once = worker.run(pack([Request(adapter, [item])]))[0]
    twice = worker.run(pack([Request(adapter, [item, item])]))[0]
    assert (twice.grad - 2 * once.grad).norm() <= 1e-5 * once.grad.norm()
    zero = worker.run(pack([Request(adapter, [silent])]))[0]
    assert not zero.grad.any() and zero.metrics["loss:sum"] == 0.0
    assert torch.equal(zero.logprobs, once.logprobs)


def test_a_tied_head_leaves_the_embedding_alone():
    base = BaseModel.load(tiny_qwen3(tied=True))
    adapter = random_adapter(base, LoraConfig(rank=4))
    before = base.decoder.get_input_embeddings().weight.clone()
    worker = DeviceWorker(base)
    result = worker.run(pack([Request(adapter, [random_item(np.random.default_rng(6), 20)])]))[0]
    worker.accumulate(adapter, result.grad)
    worker.optim_step([adapter], AdamParams(learning_rate=1.0))
    assert torch.equal(base.decoder.get_input_embeddings().weight, before)
    assert all(p.grad is None and not p.requires_grad for p in base.model.parameters())


def test_forward_only_gives_no_gradient_and_shares_a_batch_with_backward():
    worker = DeviceWorker(BaseModel.load(tiny_llama()))
    a, b = (random_adapter(worker.model, LoraConfig(rank=4), seed) for seed in (0, 1))
    rng = np.random.default_rng(7)
    i, j = random_item(rng, 20), random_item(rng, 9)
    mixed = worker.run(pack([Request(a, [i], backward=False), Request(b, [j])]))
    alone = worker.run(pack([Request(b, [j])]))[0]
    assert mixed[0].grad is None and torch.equal(mixed[1].grad, alone.grad)
    assert mixed[0].metrics == worker.run(pack([Request(a, [i])]))[0].metrics


def test_failure_leaves_the_adapter_alone():
    worker = DeviceWorker(BaseModel.load(tiny_llama()))
    adapter = random_adapter(worker.model, LoraConfig(rank=4))
    before = adapter.params.clone()
    batch = pack([Request(adapter, [random_item(np.random.default_rng(8), 20)])])
    batch.targets[3] = 10**9
    with pytest.raises(Exception, match="out of"):
        worker.run(batch)
    assert torch.equal(adapter.params, before) and adapter.grads is None
