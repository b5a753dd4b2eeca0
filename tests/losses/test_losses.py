"""Every loss against its formula in float64 autograd through peft: value, logprobs, the gradient of every LoRA matrix, metrics."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch

from spindle import losses
from spindle.compute.model import BaseModel
from spindle.compute.worker import DeviceWorker
from spindle.errors import InvalidRequest
from spindle.types import AdamParams, LoraConfig
from tests.compute.helpers import Item, Oracle, Request, pack, random_adapter, random_item
from tests.tiny import tiny_llama


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


@pytest.fixture(scope="module")
def worker(model):
    return DeviceWorker(BaseModel.load(copy.deepcopy(model)))


def clip(r, c):
    return r.clamp(c["clip_low_threshold"], c["clip_high_threshold"])


def ppo(p, i, c):
    r, a = (p - i["logprobs"]).exp(), i["advantages"]
    return -(torch.minimum(r * a, clip(r, c) * a) * i["weights"]).sum()


def gspo(p, i, c):
    m = i["sequence_ratio_mask"] != 0
    r = ((p.detach() - i["logprobs"])[m].mean() + p - p.detach()).exp()
    a = i["advantages"]
    return -(torch.minimum(r * a, clip(r, c) * a) * i["weights"]).sum()


def stable(p, i, c):
    on = ~i["sampler_logprobs"].isnan()
    p, q, a, w = p[on], i["sampler_logprobs"][on], i["advantages"][on], i["weights"][on]
    return ((-clip((p - q).exp().detach(), c) * a * p + c["kl_coeff"] / 2 * (p - q) ** 2) * w).sum()


EDGES = [{"clip_low_threshold": x, "clip_high_threshold": x} for x in (0.0, 1.0)]
FORMULAS = {
    "cross_entropy": (lambda p, i, c: -(i["weights"] * p).sum(), [{}]),
    "importance_sampling": (lambda p, i, c: -((p - i["logprobs"]).exp() * i["advantages"] * i["weights"]).sum(), [{}]),
    "ppo": (ppo, [{}, *EDGES, {"clip_low_threshold": 0.0, "clip_high_threshold": 1e9}]),
    "cispo": (
        lambda p, i, c: -(clip((p - i["logprobs"]).exp().detach(), c) * i["advantages"] * p * i["weights"]).sum(),
        [{}, {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}, {"clip_low_threshold": 0.0, "clip_high_threshold": 0.0}],
    ),
    "dro": (
        lambda p, i, c: -((i["advantages"] * p - c["beta"] / 2 * (p - i["logprobs"]) ** 2) * i["weights"]).sum(),
        [{}, {"beta": 0.0}, {"beta": 3.0}],
    ),
    "gspo": (gspo, [{}, *EDGES, {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}]),
    "stable_reinforce": (stable, [{}, {"kl_coeff": 0.0}, {"kl_coeff": 1.0, "clip_low_threshold": 0.8, "clip_high_threshold": 1.0}, *EDGES]),
}


def items_for(name: str, adapter, worker, rng, wide: bool = False) -> list[Item]:
    """Sampler logprobs close to the model's, so that ratios lie around 1. wide: targets [N, 2] and [N, 3] beside [N]."""
    items = [random_item(rng, n, k if wide else 0) for n, k in ((9, 2), (40, 0), (21, 3))]
    p = worker.run(pack([Request(adapter, items, backward=False)]))[0].logprobs.numpy()
    at = 0
    for i in items:
        n = i.targets.size
        q = (p[at : at + n] + rng.normal(size=n) * 0.3).astype(np.float32)
        acting = rng.random(n) < 0.7
        i.inputs |= {
            "logprobs": q,
            "advantages": np.where(acting, rng.normal(size=n), 0).astype(np.float32),
            "sequence_ratio_mask": (acting & (np.arange(n) > 1) | (np.arange(n) == n - 1)).astype(np.float32),
            "sampler_logprobs": np.where(acting, q, np.nan).astype(np.float32),
        }
        i.inputs = {name: x.reshape(i.targets.shape) for name, x in i.inputs.items()}
        at += n
    return items


@pytest.mark.parametrize(
    ("name", "given", "wide"),
    [(n, c, w) for n, (_, configs) in FORMULAS.items() for w in (False, True) for c in configs[: 1 if w else None]],
)
def test_against_the_formula(model, worker, name, given, wide):
    rng = np.random.default_rng(0)
    adapter = random_adapter(worker.model, LoraConfig(rank=4))
    items = items_for(name, adapter, worker, rng, wide)
    config = {**losses.get(name).defaults, **given}
    result = worker.run(pack([Request(adapter, items, name, given)]))[0]
    oracle = Oracle(model, adapter)
    formula = FORMULAS[name][0]
    ps = [oracle.logprobs(i) for i in items]
    loss = sum(formula(p, {k: torch.from_numpy(v).double() for k, v in i.inputs.items()}, config) for p, i in zip(ps, items, strict=True))
    loss.backward()
    oracle.assert_grads(result.grad, 2e-5)
    assert result.metrics["loss:sum"] == pytest.approx(loss.item(), rel=1e-5, abs=1e-5)
    assert (result.logprobs - torch.cat([p.reshape(-1) for p in ps])).abs().max() <= 1e-5
    assert worker.run(pack([Request(adapter, items, name, given, backward=False)]))[0].metrics == pytest.approx(result.metrics, rel=1e-6)


def test_zero_advantages_give_no_gradient(worker):
    adapter = random_adapter(worker.model, LoraConfig(rank=4))
    items = items_for("ppo", adapter, worker, np.random.default_rng(1))
    for i in items:
        i.inputs["advantages"][:] = 0
    for name in ("importance_sampling", "ppo", "cispo", "gspo"):
        assert not worker.run(pack([Request(adapter, items, name)]))[0].grad.any()


def test_two_configs_in_one_batch_keep_their_own(worker):
    a, b = (random_adapter(worker.model, LoraConfig(rank=4), seed) for seed in (0, 1))
    items = items_for("ppo", a, worker, np.random.default_rng(2))
    tight = {"clip_low_threshold": 0.99, "clip_high_threshold": 1.01}
    mixed = worker.run(pack([Request(a, items, "ppo", tight), Request(b, items, "ppo")]))
    for result, (adapter, config) in zip(mixed, ((a, tight), (b, {})), strict=True):
        alone = worker.run(pack([Request(adapter, items, "ppo", config)]))[0]
        assert torch.equal(result.grad, alone.grad) and result.metrics == alone.metrics
    assert mixed[0].metrics["clip_fraction:mean"] > mixed[1].metrics["clip_fraction:mean"] > 0


@pytest.mark.parametrize("name", [name for name in FORMULAS if name != "cross_entropy"])
def test_metrics_of_parts_combine_to_those_of_the_whole(worker, name):
    """As the SDK adds its chunks up; each a mean per datum over the cells that act, then over datums."""
    from tinker.lib.chunked_fwdbwd_helpers import combine_fwd_bwd_output_results
    from tinker.types import ForwardBackwardOutput

    adapter = random_adapter(worker.model, LoraConfig(rank=4))
    items = items_for(name, adapter, worker, np.random.default_rng(3))
    whole = worker.run(pack([Request(adapter, items, name)]))[0].metrics
    parts = [(worker.run(pack([Request(adapter, part, name)]))[0].metrics, len(part)) for part in (items[:1], items[1:])]
    outputs = [ForwardBackwardOutput(loss_fn_output_type="x", loss_fn_outputs=[{}] * n, metrics=m) for m, n in parts]
    assert combine_fwd_bwd_output_results(outputs).metrics == pytest.approx(whole, rel=1e-5)

    bounds = {k: v for k, v in losses.get(name).defaults.items() if k.startswith("clip")}
    ratios, clipped, kl = [], [], []
    p = worker.run(pack([Request(adapter, items, backward=False)]))[0].logprobs.double()
    for i, own in zip(items, p.split([len(i.tokens) for i in items]), strict=True):
        on = torch.from_numpy(i.inputs["advantages"]) != 0
        log_ratio = own - torch.from_numpy(i.inputs["logprobs"])
        used = log_ratio[torch.from_numpy(i.inputs["sequence_ratio_mask"]) != 0].mean().expand(len(own)) if name == "gspo" else log_ratio
        r = used[on].exp()
        ratios.append(r.mean())
        clipped.append(((r < bounds["clip_low_threshold"]) | (r > bounds["clip_high_threshold"])).double().mean() if bounds else None)
        kl.append((log_ratio[on].exp() - 1 - log_ratio[on]).mean())
    want = {"ratio:mean": ratios, "kl:mean": kl} | ({"clip_fraction:mean": clipped} if bounds else {})
    assert set(whole) == {"loss:sum", *want}
    assert {k: whole[k] for k in want} == pytest.approx({k: float(sum(v) / len(v)) for k, v in want.items()}, rel=1e-5)


def test_what_a_loss_refuses_fails_its_segment_alone(worker):
    a, b = (random_adapter(worker.model, LoraConfig(rank=4), seed) for seed in (0, 1))
    items = items_for("gspo", a, worker, np.random.default_rng(4))
    good = worker.run(pack([Request(b, items)]))[0]
    broken = copy.deepcopy(items)
    broken[1].inputs["sequence_ratio_mask"][:] = 0
    results = worker.run(pack([Request(a, broken, "gspo"), Request(b, items)]))
    assert "datum 1" in str(results[0].error) and "sequence_ratio_mask is 0 everywhere" in str(results[0].error)
    assert results[0].grad is None and results[0].metrics == {}
    assert results[1].error is None and torch.equal(results[1].grad, good.grad)
    broken = copy.deepcopy(items)
    broken[0].inputs["sampler_logprobs"][:] = np.nan
    result = worker.run(pack([Request(a, broken, "stable_reinforce")]))[0]
    assert isinstance(result.error, InvalidRequest) and "advantages: not 0 at a token" in str(result.error)


def test_a_new_loss_is_one_file(worker, tmp_path, monkeypatch):
    (tmp_path / "hinge.py").write_text(
        "from spindle.losses import Loss\n"
        "LOSS = Loss('hinge', lambda p, i, c, s: (c['margin'] - p).clamp(min=0) * i['weights'], optional={'weights': 1.0}, "
        "defaults={'margin': -1.0})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import hinge

    losses.register(hinge.LOSS)
    adapter = random_adapter(worker.model, LoraConfig(rank=4))
    item = random_item(np.random.default_rng(5), 30)
    item.inputs.clear()
    first = None
    for _ in range(10):
        result = worker.run(pack([Request(adapter, [item], "hinge")]))[0]
        first = first or result.metrics["loss:sum"]
        worker.accumulate(adapter, result.grad)
        worker.optim_step([adapter], AdamParams(learning_rate=1e-2))
    assert result.metrics["loss:sum"] < 0.7 * first


@pytest.mark.parametrize("name", FORMULAS)
def test_a_loss_is_short(name):
    """At most 40 lines of code, docstring and blank lines aside, and one line that registers it."""
    code = (Path(losses.__file__).parent / f"{name}.py").read_text().split('"""', 2)[2]
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 40
    assert Path(losses.__file__).read_text().count(f"register({name}.LOSS)") == 1
