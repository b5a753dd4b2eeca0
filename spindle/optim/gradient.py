"""What every optimizer does first: take the gradients, measure them, refuse broken ones, clip."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from spindle.compute.adapter import Adapter

__all__ = ["take_gradients"]


def take_gradients(adapters: Sequence[Adapter], clip_norm: float) -> list[tuple[torch.Tensor | None, dict[str, float]]]:
    """Of each adapter the accumulated gradient [P], cleared from it and clipped to a global norm of ``clip_norm`` (0: off); zeros when
    there was none; None when it is not finite. With it, the metrics grad_norm (before clipping) and step_skipped."""
    grads = [adapter.grads for adapter in adapters]
    met = [grad for grad in grads if grad is not None]
    norms = iter(torch.stack([_norm(grad) for grad in met]).tolist() if met else [])
    taken: list[tuple[torch.Tensor | None, dict[str, float]]] = []
    for adapter, grad in zip(adapters, grads, strict=True):
        adapter.grads = None
        adapter.drop_copies()
        if grad is None:
            taken.append((torch.zeros_like(adapter.params), {"grad_norm": 0.0, "step_skipped": 0.0}))
            continue
        norm = next(norms)
        if not math.isfinite(norm):  # squares of large numbers are not finite in float32, though the gradient may be
            norm = float(torch.linalg.vector_norm(grad, dtype=torch.float64))
        if not math.isfinite(norm):
            taken.append((None, {"step_skipped": 1.0}))
            continue
        if clip_norm > 0:
            grad.mul_(min(1.0, clip_norm / (norm + 1e-6)))  # as torch.nn.utils.clip_grad_norm_
        taken.append((grad, {"grad_norm": norm, "step_skipped": 0.0}))
    return taken


def _norm(grad: torch.Tensor) -> torch.Tensor:
    """Euclidean norm as float64: short float32 norms, put together in float64 (15 times as fast as float64 throughout)."""
    whole = grad.numel() // 4096 * 4096
    rows = torch.linalg.vector_norm(grad[:whole].view(-1, 4096), dim=1)
    rest = torch.linalg.vector_norm(grad[whole:])
    return torch.linalg.vector_norm(torch.cat([rows, rest[None]]).double())
