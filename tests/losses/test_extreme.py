"""Extreme inputs of every loss: the answer is a user error or a number, the step after it skipped or finite, and the adapter whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import spindle
from spindle import AdamParams, Datum, DimuonParams, losses
from spindle.compute.model import BaseModel
from spindle.compute.worker import DeviceWorker
from spindle.errors import UserError
from spindle.types import LoraConfig
from tests.compute.helpers import Item, Request, pack, random_adapter
from tests.tiny import VOCAB, tiny_llama

N = 12
EXTREMES = {
    "sampler almost never": {"logprobs": -1e4},
    "sampler more than always": {"logprobs": 1e4},
    "sampler beyond all floats": {"logprobs": -3e38},
    "advantages": {"advantages": 1e30},
    "negative advantages": {"advantages": -3e38},
    "weights": {"weights": 3e38},
    "all": {"logprobs": -1e4, "advantages": 1e30, "weights": 1e30},
    "all negative": {"logprobs": -1e4, "advantages": -1e30, "weights": -1e30},
    "opposed": {"logprobs": 1e4, "advantages": 1e30, "weights": -1e30},
    "tiny": {"advantages": 1e-45, "weights": 1e-45},
}


def traced_ratio(logprobs, old, advantages, weights):
    return -((logprobs - old).exp() * advantages * weights).sum(), {"custom/ratio:mean": (logprobs - old).exp().mean()}


@pytest.fixture(scope="module")
def engine():
    with spindle.Engine(BaseModel.load(tiny_llama())) as engine:
        yield engine


@pytest.fixture(scope="module")
def custom():
    from tinker.lib.public_interfaces.custom_loss import encode_graph, trace_loss

    handle = trace_loss(traced_ratio, dict.fromkeys(("logprobs", "old", "advantages", "weights"), 1), "s")
    return losses.create_custom("ratio", [i.model_dump() for i in handle.inputs], encode_graph(handle).model_dump(), "s")


def datum(loss: str, extreme: dict[str, float]) -> Datum:
    rng = np.random.default_rng(0)
    full = lambda name, usual: np.full(N, extreme.get(name, usual), np.float32)  # noqa: E731
    inputs = {"target_tokens": rng.integers(0, VOCAB, N), "advantages": full("advantages", 1.0), "weights": full("weights", 1.0)}
    inputs["old" if loss == "custom" else "logprobs"] = full("logprobs", -7.0)
    return Datum(rng.integers(0, VOCAB, N), inputs)


def state(adapter):
    return [x.clone() for x in (adapter.params, adapter.exp_avg, adapter.exp_avg_sq)]


LOSSES = [name for name in losses.names() if name != "stable_reinforce"]  # that one below: its q is the engine's own


def check(engine, optimizer, call):
    """``call(handle)`` then a step: nothing that is not finite gets into the adapter, and it trains on afterwards."""
    handle = engine.create_adapter(rank=4, seed=1, optimizer=optimizer)
    adapter = engine.resident(handle.model_id).adapter
    before = state(adapter)
    params = DimuonParams() if optimizer == "dimuon" else AdamParams()
    output = None
    try:
        output = call(handle).result(60)
    except UserError as error:
        assert str(error)
    step = handle.optim_step(params).result(60).metrics
    after = state(adapter)
    assert all(x.isfinite().all() for x in after)
    if step["step_skipped"]:
        assert output is not None and all(torch.equal(a, b) for a, b in zip(before, after, strict=True)) and adapter.step == 0
    elif output is None:
        assert step["grad_norm"] == 0.0
    if output is not None:
        assert np.isfinite(output.loss_fn_outputs[0]["logprobs"]).all() and "loss:sum" in output.metrics
    assert adapter.grads is None
    good = Datum([1, 2, 3], {"target_tokens": [2, 3, 4]})
    assert np.isfinite(handle.forward_backward([good]).result(60).loss)
    last = handle.optim_step(params).result(60).metrics
    assert last["step_skipped"] == 0 and last["grad_norm"] > 0 and all(x.isfinite().all() for x in state(adapter))
    engine.unload(handle.model_id)
    return output, step


@pytest.mark.parametrize("extreme", EXTREMES)
@pytest.mark.parametrize("loss", LOSSES)
def test_nothing_that_is_not_finite_enters_an_adapter(engine, custom, loss, extreme):
    config = {"loss_id": custom} if loss == "custom" else {}
    for optimizer in ("adamw", "dimuon"):
        output, step = check(engine, optimizer, lambda handle: handle.forward_backward([datum(loss, EXTREMES[extreme])], loss, config))
        if extreme == "tiny":
            assert output is not None and step["step_skipped"] == 0
        if loss in ("importance_sampling", "custom") and extreme == "sampler almost never":  # r = exp(p + 10,000)
            assert output.loss == -np.inf and step["step_skipped"] == 1
        if loss in ("ppo", "cispo", "gspo") and extreme == "sampler almost never":  # clipped
            assert np.isfinite(output.loss) and step["step_skipped"] == 0


@pytest.mark.parametrize("extreme", EXTREMES)
def test_stable_reinforce(engine, extreme):
    """Its sampler logprobs are the engine's own: here they are given to the worker."""
    worker = DeviceWorker(engine.model)
    rng = np.random.default_rng(0)
    full = lambda name, usual: np.full(N, EXTREMES[extreme].get(name, usual), np.float32)  # noqa: E731
    inputs = {name: full(name, 1.0) for name in ("advantages", "weights")}
    inputs |= {"logprobs": full("logprobs", -7.0), "sampler_logprobs": full("logprobs", -7.0)}
    adapter = random_adapter(engine.model, LoraConfig(rank=4))
    before = state(adapter)
    item = Item(rng.integers(0, VOCAB, N), rng.integers(0, VOCAB, N), inputs)
    result = worker.run(pack([Request(adapter, [item], "stable_reinforce")]))[0]
    assert result.error is None and result.logprobs.isfinite().all()
    finite = bool(result.grad.isfinite().all())
    worker.accumulate(adapter, result.grad)
    (step,) = worker.optim_step([adapter], AdamParams())
    assert all(x.isfinite().all() for x in state(adapter)) and adapter.grads is None
    if step["step_skipped"]:
        assert all(torch.equal(a, b) for a, b in zip(before, state(adapter), strict=True))
    assert step["step_skipped"] or finite


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo", "gspo"])
def test_a_ratio_past_all_floats_counts_for_nothing_where_the_formula_says_so(engine, loss):
    """At cells without an advantage or weight, and beyond the clip range: no NaN, and the other cells' gradient keeps its bits."""
    grads = []
    for q in (-8.0, -1e4):
        one = datum(loss, {})
        inputs = one.loss_fn_inputs
        inputs["advantages"][3], inputs["weights"][6] = 0.0, 0.0
        inputs["sequence_ratio_mask"] = np.ones(N, np.float32)
        places = [3, 6]
        if loss in ("ppo", "cispo"):
            places.append(9)
            inputs["logprobs"][9] = -40.0  # past the upper bound either way
        inputs["sequence_ratio_mask"][places] = 0.0
        inputs["logprobs"][places] = np.minimum(q, inputs["logprobs"][places])
        handle = engine.create_adapter(rank=4, seed=1)
        assert np.isfinite(handle.forward_backward([one], loss).result(60).loss)
        grads.append(engine.resident(handle.model_id).adapter.grads.clone())
        engine.unload(handle.model_id)
    assert grads[0].any() and torch.equal(*grads)


@pytest.mark.parametrize("name", ["weights", "advantages", "logprobs", "sequence_ratio_mask"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused_by_its_place(engine, name, value):
    handle = engine.create_adapter(rank=4, seed=1)
    one = datum("ppo", {})
    one.loss_fn_inputs[name] = np.ones(N, np.float32)
    one.loss_fn_inputs[name][7] = value
    with pytest.raises(UserError, match=rf"datum 0: {name}: value 7 is {value!s}: it must be finite"):
        handle.forward_backward([one], "ppo").result(60)
    assert handle.optim_step().result(60).metrics["grad_norm"] == 0.0
    engine.unload(handle.model_id)


def test_a_neighbour_in_the_same_micro_batch_keeps_its_bits(engine):
    """A loss that blows up shares a pass with one that does not."""
    good = Datum(np.arange(9), {"target_tokens": np.arange(9)[::-1].copy()})
    grads = []
    for bad in (False, True):
        held, one, other = (engine.create_adapter(rank=4, seed=seed) for seed in (0, 1, 2))
        waiting = held.forward([Datum(np.arange(400) % VOCAB, {"target_tokens": np.arange(400) % VOCAB})])
        if bad:
            one.forward_backward([datum("importance_sampling", EXTREMES["all"])], "importance_sampling")
        other.forward_backward([good]).result(60)
        waiting.result(60)
        grads.append(engine.resident(other.model_id).adapter.grads.clone())
        for handle in (held, one, other):
            engine.unload(handle.model_id)
    assert grads[0].any() and torch.equal(*grads)
