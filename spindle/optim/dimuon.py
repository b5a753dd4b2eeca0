"""Dimuon. The hosted service's exact rule is not public; this definition is ours.

Per LoRA matrix (A [r, in], B [out, r]; each expert of a stack is a matrix of its own), with gradient g and step settings:

    m <- beta1 m + (1 - beta1) g
    D  = U diag(s / sqrt(s^2 + damping s_max^2)) V^T      where m = U diag(s) V^T; singular values below 1e-6 s_max count as 0
    D <- D sqrt(r) / ||D||_F                              (damping 0, m of full rank: D is the matrix sign of m, which has that norm)
    p <- p - learning_rate (32 / r)^rank_lr_correction_exponent D

damping defaults to 0, rank_lr_correction_exponent to 1/2: the step then has Frobenius norm learning_rate sqrt(32) at every rank. A matrix
whose m is zero stays. The gradient is clipped to grad_clip_norm over the whole adapter first, as for AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from spindle.compute.adapter import Adapter, views
from spindle.optim.gradient import take_gradients
from spindle.optim.overflow import bounds_after, carry, skip
from spindle.types import DimuonParams

__all__ = ["dimuon_step"]

_CUTOFF = 1e-12  # of squared singular values


def _directions(momentum: torch.Tensor, adapter: Adapter, damping: float) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Target path -> D of A and of B, each [experts, r, n] float64."""
    rank = adapter.layout.lora.rank
    wide = {}
    for path, (a, b) in views(momentum, adapter.layout).items():
        experts = a.shape[0] // rank
        wide[path] = a.double().view(experts, rank, -1), b.double().view(-1, rank, experts).permute(2, 1, 0)
    flat = [m for pair in wide.values() for m in pair]
    values, vectors = torch.linalg.eigh(torch.cat([m @ m.transpose(1, 2) for m in flat]))  # all [r, r], in one batch
    top = values[:, -1:].clamp_min(torch.finfo(torch.float64).tiny)
    inverse = torch.where(values > _CUTOFF * top, (values.clamp_min(0) + damping * top).rsqrt(), 0.0)
    roots = ((vectors * inverse[:, None]) @ vectors.transpose(1, 2)).split([len(m) for m in flat])
    out = []
    for m, root in zip(flat, roots, strict=True):
        d = root @ m
        out.append(d * (math.sqrt(rank) / d.flatten(1).norm(dim=1).clamp_min(1e-300))[:, None, None])
    return dict(zip(wide, zip(out[::2], out[1::2], strict=True), strict=True))


@torch.no_grad()
def dimuon_step(adapters: Sequence[Adapter], params: DimuonParams) -> list[dict[str, float]]:
    """One step of each adapter with its accumulated gradient (zero when there is none), which is then cleared. Metrics as for AdamW."""
    exponent = 0.5 if params.rank_lr_correction_exponent is None else params.rank_lr_correction_exponent
    taken = take_gradients(adapters, params.grad_clip_norm)
    for adapter, (grad, metrics) in zip(adapters, taken, strict=True):
        metrics["learning_rate"] = params.learning_rate
        if grad is None:
            continue
        rate = params.learning_rate * (32 / adapter.layout.lora.rank) ** exponent
        furthest = rate * math.sqrt(adapter.layout.lora.rank)  # an entry of D is at most its norm
        grad_norm = min(metrics["grad_norm"], params.grad_clip_norm) if params.grad_clip_norm > 0 else metrics["grad_norm"]
        bounds = bounds_after(adapter, grad_norm, lambda known, furthest=furthest: known.params + furthest)  # type: ignore[misc]
        if bounds is None:
            skip(metrics)
            continue
        adapter.exp_avg.lerp_(grad, 1 - params.beta1)
        adapter.step += 1
        if not adapter.layout.numel:
            continue
        matrices = views(adapter.params, adapter.layout)
        for path, (da, db) in _directions(adapter.exp_avg, adapter, params.damping or 0.0).items():
            a, b = matrices[path]
            a.sub_(da.reshape(a.shape).to(a.dtype), alpha=rate)
            b.sub_(db.permute(2, 1, 0).reshape(b.shape).to(b.dtype), alpha=rate)
        carry(adapter, bounds)
    return [metrics for _, metrics in taken]
