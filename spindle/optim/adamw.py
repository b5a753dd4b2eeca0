"""AdamW exactly as torch.optim.AdamW, on one flat buffer."""

from __future__ import annotations

import torch
from torch.optim.adamw import adamw

from spindle.compute.adapter import Adapter
from spindle.optim.gradient import take_gradient
from spindle.types import AdamParams

__all__ = ["adamw_step"]


@torch.no_grad()
def adamw_step(adapter: Adapter, params: AdamParams) -> dict[str, float]:
    """One step with the accumulated gradient (zero when there is none), which is then cleared.

    Returns grad_norm (before clipping), learning_rate and step_skipped: 1 when the gradient was not finite and nothing was changed.
    """
    grad, metrics = take_gradient(adapter, params.grad_clip_norm)
    metrics["learning_rate"] = params.learning_rate
    if grad is None:
        return metrics
    adamw(
        [adapter.params],
        [grad],
        [adapter.exp_avg],
        [adapter.exp_avg_sq],
        [],
        [torch.tensor(float(adapter.step), device=adapter.device)],
        fused=True,
        amsgrad=False,
        beta1=params.beta1,
        beta2=params.beta2,
        lr=params.learning_rate,
        weight_decay=params.weight_decay,
        eps=params.eps,
        maximize=False,
    )
    adapter.step += 1
    return metrics
