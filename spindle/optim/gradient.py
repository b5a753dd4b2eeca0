"""What every optimizer does first: take the gradient, measure it, refuse a broken one, clip it."""

from __future__ import annotations

import math

import torch

from spindle.compute.adapter import Adapter

__all__ = ["take_gradient"]


def take_gradient(adapter: Adapter, clip_norm: float) -> tuple[torch.Tensor | None, dict[str, float]]:
    """The accumulated gradient [P], cleared from the adapter and clipped to a global norm of ``clip_norm`` (0: off); zeros when there
    was none; None when it is not finite. With it, the metrics grad_norm (before clipping) and step_skipped."""
    grad, adapter.grads = adapter.grads, None
    adapter.drop_copies()
    if grad is None:
        return torch.zeros_like(adapter.params), {"grad_norm": 0.0, "step_skipped": 0.0}
    norm = torch.linalg.vector_norm(grad, dtype=torch.float64).item()
    if not math.isfinite(norm):
        return None, {"step_skipped": 1.0}
    if clip_norm > 0:
        grad.mul_(min(1.0, clip_norm / (norm + 1e-6)))  # as torch.nn.utils.clip_grad_norm_
    return grad, {"grad_norm": norm, "step_skipped": 0.0}
