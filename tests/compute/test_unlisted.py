"""unlisted_logprobs="skip": the head runs on rows that a sparse request lists, and nothing else of the answer changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import spindle
from spindle import codec, losses
from spindle.compute.model import BaseModel
from spindle.compute.worker import DeviceWorker
from spindle.errors import UserError
from spindle.halving import part_of
from spindle.types import LoraConfig
from tests.compute.helpers import Item, Request, pack, random_adapter, random_item
from tests.tiny import VOCAB, tiny_qwen3

NAMES = ("logprobs", "advantages", "weights", "sequence_ratio_mask")


@pytest.fixture(scope="module")
def model():
    return BaseModel.load(tiny_qwen3())


def sparse(n, k, seed=0, share=0.2, names=("weights",)):
    """(item with zeros where nothing is listed, its listed cells): each input lists cells of its own."""
    rng = np.random.default_rng(seed)
    item, listed = random_item(rng, n, k), np.zeros((n, k), bool)
    for name in ("target_tokens", *names):
        on = rng.random((n, k)) < share
        listed |= on
        if name == "target_tokens":
            item.targets[~on] = 0
            item.targets[on] |= 1  # none of them is 0, or it would not be listed
        else:
            item.inputs[name] = np.where(on, rng.normal(size=(n, k)) - (1.0 if name == "logprobs" else 0.0), 0).astype(np.float32)
    if "sequence_ratio_mask" in names:
        item.inputs["sequence_ratio_mask"] = listed.astype(np.float32)
    return item, listed


def csr(item):
    return spindle.Datum(
        item.tokens,
        {name: torch.from_numpy(x).to_sparse_csr() for name, x in {"target_tokens": item.targets, **item.inputs}.items()},
    )


def dense(item):
    return spindle.Datum(item.tokens, {"target_tokens": item.targets, **item.inputs})


def answers(model, calls, mode):
    """What an engine answers to each (data, loss), one after the other, and the gradient they add up to."""
    with spindle.Engine(model, unlisted_logprobs=mode) as engine:
        adapter = engine.create_adapter(rank=4, seed=1)
        other = random_adapter(model, adapter.lora)  # B not zero
        engine.resident(adapter.model_id).adapter.params.copy_(other.params)
        outputs = [adapter.forward_backward(data, loss).result(60) for data, loss in calls]
        return outputs, engine.resident(adapter.model_id).adapter.grads.clone()


@pytest.mark.parametrize("loss", ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"])
def test_listed_cells_keep_their_bits_and_the_others_are_zero(model, loss):
    names = ("weights",) if loss == "cross_entropy" else NAMES if loss == "gspo" else NAMES[:3]
    items = [sparse(n, k, seed, names=names) for seed, (n, k) in enumerate(((60, 1), (5, 3), (40, 2)))]
    data = [csr(item) for item, _ in items]
    ((whole,), grad), ((skipped,), grad_of_skipped) = (answers(model, [(data, loss)], mode) for mode in ("compute", "skip"))
    assert grad.any() and torch.equal(grad, grad_of_skipped)
    assert skipped.metrics == whole.metrics
    for (item, listed), a, b in zip(items, whole.loss_fn_outputs, skipped.loss_fn_outputs, strict=True):
        assert listed.any() and not listed.all() and (a["logprobs"] < 0).all()
        assert np.array_equal(b["logprobs"], np.where(listed, a["logprobs"], 0.0)), item.tokens.shape


def test_what_is_not_sparse_throughout_is_computed_whole(model):
    item, _ = sparse(30, 2)
    half = spindle.Datum(item.tokens, {**csr(item).loss_fn_inputs, "weights": item.inputs["weights"]})
    bare = spindle.Datum(item.tokens, {"target_tokens": csr(item).loss_fn_inputs["target_tokens"]})  # weights are ones
    for one in (dense(item), half, bare):
        ((whole,), grad), ((skipped,), other) = (answers(model, [([one], "cross_entropy")], mode) for mode in ("compute", "skip"))
        assert np.array_equal(whole.loss_fn_outputs[0]["logprobs"], skipped.loss_fn_outputs[0]["logprobs"]) and torch.equal(grad, other)


def test_a_custom_loss_sees_every_logprob(model):
    nodes = [
        {"op": "placeholder", "name": "p", "target": "logprobs"},
        {"op": "placeholder", "name": "w", "target": "weights"},
        {"op": "call_method", "name": "s", "target": "sum", "args": [{"ref": "p"}]},
        {"op": "output", "name": "o", "target": "output", "args": [{"tuple": [{"ref": "s"}, {"dict": {}}]}]},
    ]
    inputs = [{"name": "logprobs", "rank": 2}, {"name": "weights", "rank": 2}]
    config = {"loss_id": losses.create_custom("sum", inputs, {"format": 1, "nodes": nodes})}
    with spindle.Engine(model, unlisted_logprobs="skip") as engine:
        output = engine.create_adapter(rank=4, seed=1).forward_backward([csr(sparse(20, 2)[0])], "custom", config).result(60)
    assert output.loss == pytest.approx(float(output.loss_fn_outputs[0]["logprobs"].sum()), rel=1e-5) and output.loss < -40


def test_empty_lists(model):
    nothing = Item(np.arange(9), np.zeros((9, 2), np.int64), {"weights": np.zeros((9, 2), np.float32)})
    (output, after), grad = answers(model, [([csr(nothing)], "cross_entropy"), ([dense(sparse(9, 2)[0])], "cross_entropy")], "skip")
    assert not output.loss_fn_outputs[0]["logprobs"].any() and output.loss == 0.0
    assert after.loss != 0.0 and grad.any()


@pytest.fixture(scope="module")
def worker(model):
    return DeviceWorker(model)


def listing(batch, *listed):
    for segment, cells in zip(batch.segments, listed, strict=True):
        segment.listed = None if cells is None else np.flatnonzero(cells)
    return batch


def test_neighbours_are_not_felt(worker):
    """The same bits whoever else skips or does not, with few asked rows and many."""
    a, b, c = (random_adapter(worker.model, LoraConfig(rank=4), seed) for seed in (0, 1, 2))
    for n, share in ((200, 0.02), (200, 0.5), (3, 0.5)):
        mine, listed = sparse(n, 2, n, share)
        alone = worker.run(listing(pack([Request(a, [mine])]), listed))[0]
        plain = worker.run(pack([Request(a, [mine])]))[0]
        assert torch.equal(alone.grad, plain.grad)
        for seed, other_share in ((1, 0.01), (2, 0.9), (3, None)):
            theirs, their_listed = sparse(50, 3, seed, other_share or 0.2)
            requests = [Request(b, [theirs]), Request(a, [mine]), Request(c, [theirs], backward=False)]
            batch = listing(pack(requests), their_listed if other_share else None, listed, None)
            mixed = worker.run(batch)
            assert torch.equal(mixed[1].logprobs, alone.logprobs) and torch.equal(mixed[1].grad, alone.grad)
            assert mixed[1].metrics == alone.metrics
            kept = torch.from_numpy(their_listed.reshape(-1)) if other_share else torch.ones(150, dtype=torch.bool)
            whole = worker.run(pack([Request(c, [theirs], backward=False)]))[0]
            got = worker.run(listing(pack([Request(c, [theirs], backward=False)]), their_listed if other_share else None))[0]
            assert torch.equal(got.logprobs, torch.where(kept, whole.logprobs, 0.0)) and got.metrics == whole.metrics


def test_the_head_sees_only_asked_rows(worker, monkeypatch):
    seen = []
    run = worker.model.head.run
    monkeypatch.setattr(worker.model.head, "run", lambda hidden, *rest: seen.append(len(hidden)) or run(hidden, *rest))
    adapter = random_adapter(worker.model, LoraConfig(rank=4))
    item = random_item(np.random.default_rng(0), 300)
    for cells in ([7], list(range(0, 300, 10))):
        listed = np.isin(np.arange(300), cells)
        worker.run(listing(pack([Request(adapter, [item])]), listed))
    assert seen == [16, 30]


def test_halves_keep_their_lists(worker):
    adapter = random_adapter(worker.model, LoraConfig(rank=4))
    items, lists = zip(*(sparse(n, 2, n) for n in (20, 7, 31)), strict=True)
    batch = listing(pack([Request(adapter, list(items))]), np.concatenate([x.reshape(-1) for x in lists]))
    whole = worker.run(batch)[0].logprobs
    parts = [worker.run(part_of(batch, *ends)[0])[0].logprobs for ends in ((0, 1), (1, 3))]
    assert torch.equal(torch.cat(parts), whole)


def test_listed_cells_are_those_of_any_tensor():
    items = [sparse(n, k, n, names=NAMES[:3]) for n, k in ((30, 2), (1, 1), (12, 4))]
    request = codec.scan_arrays("m", 1, [csr(item) for item, _ in items], "ppo", limits=codec.Limits(vocab_size=VOCAB))
    for order in ([0, 1, 2], [2, 0]):
        want = np.flatnonzero(np.concatenate([items[d][1].reshape(-1) for d in order]))
        assert np.array_equal(codec.listed_cells(request, np.array(order), ["target_tokens", *NAMES[:3]]), want)
    assert len(codec.listed_cells(request, np.array([2]), ["weights", "absent"])) == 48
    with pytest.raises(IndexError):
        codec.listed_cells(request, np.array([3]), ["weights"])


def test_other_words_are_refused(model):
    with pytest.raises(UserError, match="unlisted_logprobs: got 'zero'; allowed are 'compute' and 'skip'"):
        spindle.Engine(model, unlisted_logprobs="zero")
