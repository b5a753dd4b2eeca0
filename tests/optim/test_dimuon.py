"""The invariants of our Dimuon: the direction against an SVD in float64, its norm, what rank and momentum do, damage refused."""

from __future__ import annotations

import math

import pytest
import torch

from spindle import optim
from spindle.compute.adapter import Adapter, views
from spindle.compute.layout import LoraTarget, build_layout
from spindle.types import DimuonParams, LoraConfig

TARGETS = [
    LoraTarget("model.layers.0.self_attn.q_proj", 24, 40, "attn"),
    LoraTarget("model.layers.0.mlp.experts", 20, 16, "mlp", 3, "mlp.experts.down_proj"),
]


def adapter(rank: int = 4) -> Adapter:
    return Adapter(build_layout(LoraConfig(rank=rank), TARGETS)).init(0)


def each_matrix(flat: torch.Tensor, a: Adapter):
    """Every [r, n] matrix of a flat buffer, experts apart."""
    rank = a.layout.lora.rank
    for one, two in views(flat, a.layout).values():
        experts = one.shape[0] // rank
        yield from one.view(experts, rank, -1)
        yield from two.view(-1, rank, experts).permute(2, 1, 0)


@pytest.mark.parametrize("damping", [None, 0.01])
@pytest.mark.parametrize("rank", [4, 8])
def test_directions_against_an_svd(rank, damping):
    ours = adapter(rank)
    before = ours.params.clone()
    generator = torch.Generator().manual_seed(0)
    ours.grads = torch.randn(ours.params.shape, generator=generator)
    grads = ours.grads.clone()
    optim.step(ours, DimuonParams(learning_rate=0.1, damping=damping))
    moved = (before - ours.params) / (0.1 * (32 / rank) ** 0.5)
    for d, g in zip(each_matrix(moved, ours), each_matrix(grads, ours), strict=True):
        u, s, v = torch.linalg.svd(g.double(), full_matrices=False)
        want = u @ torch.diag(s / (s**2 + (damping or 0) * s[0] ** 2).sqrt()) @ v
        want *= math.sqrt(rank) / want.norm()
        assert (d - want).norm() <= 1e-5 * want.norm()
        assert d.norm().item() == pytest.approx(math.sqrt(rank), rel=1e-5)
        if not damping:
            assert (d @ d.t() - torch.eye(rank)).abs().max() <= 1e-5  # orthogonal rows


def test_momentum_and_the_scale_of_the_gradient():
    ours, scaled = adapter(), adapter()
    generator = torch.Generator().manual_seed(1)
    first, second = (torch.randn(ours.params.shape, generator=generator) for _ in range(2))
    for a, factor in ((ours, 1.0), (scaled, 1000.0)):
        for g in (first, second):
            a.grads = g * factor
            optim.step(a, DimuonParams(learning_rate=0.01, beta1=0.5))
    torch.testing.assert_close(ours.params, scaled.params)
    torch.testing.assert_close(ours.exp_avg, 0.25 * first + 0.5 * second)
    assert ours.step == 2


def test_rank_correction():
    a, b = adapter(8), adapter(8)
    before = a.params.clone()
    for x, exponent in ((a, 0.0), (b, 1.0)):
        x.grads = torch.ones_like(x.params)
        optim.step(x, DimuonParams(rank_lr_correction_exponent=exponent))
    torch.testing.assert_close((b.params - before), 4 * (a.params - before), rtol=1e-3, atol=1e-8)


def test_a_rank_one_gradient_moves_along_itself_only():
    ours = adapter()
    before = ours.params.clone()
    ours.grads = torch.zeros_like(ours.params)
    views(ours.grads, ours.layout)["model.layers.0.self_attn.q_proj"][0].copy_(torch.outer(torch.arange(4.0), torch.ones(24)))
    optim.step(ours, DimuonParams(learning_rate=1.0))
    moved = views(before - ours.params, ours.layout)["model.layers.0.self_attn.q_proj"]
    assert torch.linalg.matrix_rank(moved[0], rtol=1e-4) == 1 and not moved[1].any()
    assert torch.isfinite(ours.params).all()


def test_clipping_nothing_and_damage():
    ours = adapter()
    before = ours.params.clone()
    assert optim.step(ours, DimuonParams()) == {"grad_norm": 0.0, "step_skipped": 0.0, "learning_rate": 1e-4}
    assert torch.equal(ours.params, before)
    ours.grads = torch.ones_like(ours.params)
    norm = ours.grads.norm().item()
    assert optim.step(ours, DimuonParams(grad_clip_norm=0.1))["grad_norm"] == pytest.approx(norm)
    assert ours.exp_avg.norm().item() == pytest.approx(0.1 * 0.1, rel=1e-4)
    ours.grads = torch.full_like(ours.params, math.nan)
    kept = ours.params.clone()
    assert optim.step(ours, DimuonParams())["step_skipped"] == 1.0
    assert torch.equal(ours.params, kept) and ours.grads is None


@pytest.mark.parametrize(
    "params",
    [
        DimuonParams(learning_rate=1e30),
        DimuonParams(learning_rate=3e38, rank_lr_correction_exponent=7.0),
    ],
)
def test_a_step_that_would_overflow_changes_nothing_and_says_so(params):
    ours = adapter()
    ours.grads = torch.ones_like(ours.params)
    optim.step(ours, DimuonParams(learning_rate=0.1))
    before = ours.params.clone(), ours.exp_avg.clone()
    ours.grads = torch.ones_like(ours.params)
    metrics = optim.step(ours, params)
    assert (metrics["step_skipped"], metrics["overflow"]) == (1.0, 1.0) and ours.step == 1 and ours.grads is None
    assert torch.equal(ours.params, before[0]) and torch.equal(ours.exp_avg, before[1])
