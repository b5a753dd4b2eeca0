"""AdamW exactly as torch.optim.AdamW, on flat buffers: one pass over those of all adapters that step together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim.adamw import adamw

from spindle.compute.adapter import Adapter
from spindle.optim.gradient import take_gradients
from spindle.types import AdamParams

__all__ = ["adamw_step"]


@torch.no_grad()
def adamw_step(adapters: Sequence[Adapter], params: AdamParams) -> list[dict[str, float]]:
    """One step of each adapter with its accumulated gradient (zero when there is none), which is then cleared.

    Returns grad_norm (before clipping), learning_rate and step_skipped: 1 when the gradient was not finite and nothing was changed.
    """
    taken = take_gradients(adapters, params.grad_clip_norm)
    for _, metrics in taken:
        metrics["learning_rate"] = params.learning_rate
    moving = [(adapter, grad) for adapter, (grad, _) in zip(adapters, taken, strict=True) if grad is not None]
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
    for adapter, _ in moving:
        adapter.step += 1
    return [metrics for _, metrics in taken]
