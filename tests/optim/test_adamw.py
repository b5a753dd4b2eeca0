"""AdamW on the flat buffer against torch.optim.AdamW over the list of matrices."""

from __future__ import annotations

import math

import pytest
import torch

from spindle import optim
from spindle.compute.adapter import Adapter
from spindle.compute.layout import LoraTarget, build_layout
from spindle.optim import overflow
from spindle.types import AdamParams, LoraConfig

TARGETS = [LoraTarget("model.layers.0.self_attn.q_proj", 24, 40, "attn"), LoraTarget("lm_head", 24, 100, "unembed")]


def adapter(rank: int = 3) -> Adapter:
    return Adapter(build_layout(LoraConfig(rank=rank), TARGETS)).init(0)


@pytest.mark.parametrize(
    "params",
    [AdamParams(learning_rate=1e-2), AdamParams(3e-3, 0.8, 0.99, 1e-8, weight_decay=0.1, grad_clip_norm=0.7), AdamParams(beta1=0.0)],
)
def test_twenty_steps_equal_torch(params):
    ours = adapter()
    matrices = [torch.nn.Parameter(m.clone()) for pair in ours.weights().matrices.values() for m in pair]
    reference = torch.optim.AdamW(
        matrices, params.learning_rate, (params.beta1, params.beta2), params.eps, params.weight_decay, foreach=False, fused=False
    )
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        ours.grads = torch.zeros_like(ours.params)
        for s, m in zip(ours.layout.slots, matrices, strict=True):
            m.grad = torch.randn(s.shape, generator=generator)
            ours.grads[s.offset : s.offset + s.numel] = m.grad.flatten()
        norm = math.sqrt(sum(float(m.grad.double().square().sum()) for m in matrices))
        if params.grad_clip_norm:
            torch.nn.utils.clip_grad_norm_(matrices, params.grad_clip_norm)
        reference.step()
        metrics = optim.step(ours, params)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-6)
        assert metrics["learning_rate"] == params.learning_rate and metrics["step_skipped"] == 0.0
    assert ours.step == 20 and ours.grads is None
    for s, m in zip(ours.layout.slots, matrices, strict=True):
        assert (ours.params[s.offset : s.offset + s.numel] - m.flatten()).abs().max() <= 1e-6


def test_nothing_accumulated_decays_the_weights():
    ours = adapter()
    before = ours.params.clone()
    metrics = optim.step(ours, AdamParams(learning_rate=0.1, weight_decay=0.1, grad_clip_norm=1.0))
    assert metrics["grad_norm"] == 0.0 and ours.step == 1
    torch.testing.assert_close(ours.params, before * 0.99)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(bad):
    ours = adapter()
    optim.step(ours, AdamParams())
    kept = [x.clone() for x in (ours.params, ours.exp_avg, ours.exp_avg_sq)]
    ours.grads = torch.ones_like(ours.params)
    ours.grads[5] = bad
    metrics = optim.step(ours, AdamParams())
    assert metrics == {"step_skipped": 1.0, "learning_rate": 1e-4}
    assert ours.grads is None and ours.step == 1
    assert all(torch.equal(x, y) for x, y in zip((ours.params, ours.exp_avg, ours.exp_avg_sq), kept, strict=True))


@pytest.mark.parametrize("size", [1e18, 1e30])
def test_a_finite_gradient_whose_squares_are_not_is_measured_and_clipped(size):
    ours, like = adapter(), adapter()
    unit = torch.randn(len(ours.params), generator=torch.Generator().manual_seed(0))
    ours.grads, like.grads = size * unit, unit.clone()
    metrics, expected = (optim.step(one, AdamParams(grad_clip_norm=1.0)) for one in (ours, like))
    assert metrics["step_skipped"] == 0.0 and metrics["grad_norm"] == pytest.approx(size * expected["grad_norm"], rel=1e-6)
    torch.testing.assert_close(ours.exp_avg, like.exp_avg)
    ours.grads = 1e18 * unit
    assert optim.step(ours, AdamParams())["step_skipped"] == 0.0, "AdamW itself is at home with it"
    assert ours.params.isfinite().all()


def test_the_same_seed_gives_the_same_start():
    one, two, other = adapter(), adapter(), Adapter(adapter().layout).init(1)
    assert torch.equal(one.params, two.params) and not torch.equal(one.params, other.params)
    (a, b), *_ = one.weights().matrices.values()
    assert not b.any() and a.abs().max() <= 24**-0.5 and a.std() == pytest.approx(24**-0.5 / 3**0.5, rel=0.2)


def test_a_step_that_fails_keeps_what_had_accumulated(monkeypatch):
    ours, grad = adapter(), torch.ones(adapter().layout.numel)
    ours.grads = grad
    before = ours.params.clone()

    def out_of_memory(*args, **kwargs):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr("spindle.optim.adamw.adamw", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        optim.step(ours, AdamParams())
    assert ours.grads is grad and torch.equal(ours.params, before) and ours.step == 0


def state_of(ours: Adapter) -> list[torch.Tensor]:
    return [x.clone() for x in (ours.params, ours.exp_avg, ours.exp_avg_sq)]


@pytest.mark.parametrize(
    "params",
    [
        AdamParams(learning_rate=1e30),
        AdamParams(learning_rate=3e38, weight_decay=3e38),
        AdamParams(learning_rate=1e12, weight_decay=1e10),
    ],
)
@pytest.mark.parametrize("steps_before", [0, 3])
def test_a_step_that_would_overflow_changes_nothing_and_says_so(params, steps_before):
    ours = adapter()
    for _ in range(steps_before):
        ours.grads = torch.full_like(ours.params, 0.5)
        ours.grads[:7] = 0.0
        optim.step(ours, AdamParams(beta1=0.0))
    kept = state_of(ours)
    ours.grads = torch.full_like(ours.params, 0.25)
    ours.grads[:7] = 0.0
    metrics = optim.step(ours, params)
    assert (metrics["step_skipped"], metrics["overflow"], metrics["learning_rate"]) == (1.0, 1.0, params.learning_rate)
    assert metrics["grad_norm"] == pytest.approx(0.25 * math.sqrt(len(ours.params) - 7), rel=1e-6)
    assert ours.grads is None and ours.step == steps_before
    assert all(torch.equal(x, y) for x, y in zip(state_of(ours), kept, strict=True))
    ours.grads = torch.ones_like(ours.params)
    assert optim.step(ours, AdamParams())["step_skipped"] == 0.0 and ours.params.isfinite().all()


def test_a_step_too_large_for_the_bound_but_not_in_truth_is_taken_as_ever():
    """A tiny eps, an enormous gradient: tried with a backup, kept, bit for bit torch's."""
    for params, size in ((AdamParams(eps=1e-30), 1.0), (AdamParams(learning_rate=1e-3), 1e15)):
        ours = adapter()
        reference = torch.nn.Parameter(ours.params.clone())
        torch_adam = torch.optim.AdamW([reference], params.learning_rate, (params.beta1, params.beta2), params.eps, 0.0, fused=True)
        for step in range(3):
            ours.grads = size * torch.randn(len(ours.params), generator=torch.Generator().manual_seed(step))
            reference.grad = ours.grads.clone()
            assert optim.step(ours, params)["step_skipped"] == 0.0
            torch_adam.step()
        assert torch.equal(ours.params, reference.detach())


def test_ordinary_steps_measure_once_and_never_copy(monkeypatch):
    measured = []
    monkeypatch.setattr("spindle.optim.overflow.measure", lambda *buffers: measured.append(1) or [1.0, 1.0])
    monkeypatch.setattr("spindle.optim.adamw.measure", lambda *buffers: pytest.fail("a backup was made"))
    ours = adapter()
    for step in range(100):
        ours.grads = torch.randn(len(ours.params), generator=torch.Generator().manual_seed(step))
        optim.step(ours, AdamParams(learning_rate=1e-3))
    assert len(measured) == 1


def test_carried_bounds_hold():
    ours = adapter()
    generator = torch.Generator().manual_seed(0)
    for step in range(30):
        ours.grads = 10.0 ** (step % 5 - 2) * torch.randn(len(ours.params), generator=generator)
        optim.step(ours, AdamParams(10.0 ** (step % 3 - 2), 0.1 * (step % 9), 0.9, 10.0 ** -(step % 8), 0.1 * (step % 4)))
        largest, moment = overflow._carried[ours][1]
        assert ours.params.abs().max() <= largest * (1 + 1e-6) and ours.exp_avg.abs().max() <= moment * (1 + 1e-6)
