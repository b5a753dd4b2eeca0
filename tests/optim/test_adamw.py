"""AdamW on the flat buffer against torch.optim.AdamW over the list of matrices."""

from __future__ import annotations

import math

import pytest
import torch

from spindle import optim
from spindle.compute.adapter import Adapter
from spindle.compute.layout import LoraTarget, build_layout
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
