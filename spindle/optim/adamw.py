"""AdamW exactly as torch.optim.AdamW, on flat buffers: one pass over those of all adapters that step together."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.optim.adamw import adamw

from spindle.compute.adapter import Adapter
from spindle.optim.gradient import take_gradients
from spindle.optim.overflow import LIMIT, Bounds, bounds_after, carry, measure, skip
from spindle.types import AdamParams

__all__ = ["adamw_step"]


@torch.no_grad()
def adamw_step(adapters: Sequence[Adapter], params: AdamParams) -> list[dict[str, float]]:
    """One step of each adapter with its accumulated gradient (zero when there is none), which is then cleared.

    Returns grad_norm (before clipping), learning_rate and step_skipped: 1 when nothing was changed, because the gradient was not finite or,
    with overflow 1, because the step would have left float32's range.
    """
    taken = take_gradients(adapters, params.grad_clip_norm)
    for _, metrics in taken:
        metrics["learning_rate"] = params.learning_rate
    moving = [(adapter, grad) for adapter, (grad, _) in zip(adapters, taken, strict=True) if grad is not None]
    told = [metrics for grad, metrics in taken if grad is not None]
    bounds = [_bounds(adapter, params, metrics["grad_norm"]) for (adapter, _), metrics in zip(moving, told, strict=True)]
    backups = [() if sure else tuple(x.clone() for x in _state(adapter)) for (adapter, _), sure in zip(moving, bounds, strict=True)]
    if moving:
        adamw(
            [adapter.params for adapter, _ in moving],
            [grad for _, grad in moving],
            [adapter.exp_avg for adapter, _ in moving],
            [adapter.exp_avg_sq for adapter, _ in moving],
            [],
            [torch.tensor(float(adapter.step), device=adapter.device) for adapter, _ in moving],
            fused=True,
            amsgrad=False,
            beta1=params.beta1,
            beta2=params.beta2,
            lr=params.learning_rate,
            weight_decay=params.weight_decay,
            eps=params.eps,
            maximize=False,
        )
    for (adapter, _), after, backup, metrics in zip(moving, bounds, backups, told, strict=True):
        if after is None:
            *largest, second_moment = measure(*_state(adapter))
            after = Bounds(*largest)
            if not (after.params < LIMIT and after.moment < LIMIT and math.isfinite(second_moment)):
                for buffer, before in zip(_state(adapter), backup, strict=True):
                    buffer.copy_(before)
                skip(metrics)
                continue
        adapter.step += 1
        carry(adapter, after)
    return [metrics for _, metrics in taken]


def _state(adapter: Adapter) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return adapter.params, adapter.exp_avg, adapter.exp_avg_sq


def _bounds(adapter: Adapter, params: AdamParams, grad_norm: float) -> Bounds | None:
    """An update is at most learning_rate times the largest corrected moment, over eps."""
    grad_norm = min(grad_norm, params.grad_clip_norm) if params.grad_clip_norm > 0 else grad_norm
    decay = max(1.0, abs(1.0 - params.learning_rate * params.weight_decay))
    rate = params.learning_rate / (1.0 - params.beta1 ** (adapter.step + 1))
    return bounds_after(adapter, grad_norm, lambda known: known.params * decay + rate * known.moment / params.eps)
