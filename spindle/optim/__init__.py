"""Optimizers on an adapter's flat buffers."""

from __future__ import annotations

from spindle.optim.adamw import adamw_step
from spindle.types import AdamParams

__all__ = ["adamw_step", "step"]

_STEPS = {AdamParams: adamw_step}


def step(adapter, params) -> dict[str, float]:
    """Run the optimizer that ``params`` belongs to. Clears the accumulated gradient; returns metrics."""
    return _STEPS[type(params)](adapter, params)
