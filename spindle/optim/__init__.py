"""Optimizers on adapters' flat buffers. An optimizer is one file and one line here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from spindle.compute.adapter import Adapter
from spindle.optim.adamw import adamw_step
from spindle.optim.dimuon import dimuon_step
from spindle.types import AdamParams, DimuonParams

__all__ = ["step", "step_together"]

_STEPS: dict[type, Callable[..., list[dict[str, float]]]] = {AdamParams: adamw_step, DimuonParams: dimuon_step}


def step_together(adapters: Sequence[Adapter], params: AdamParams | DimuonParams) -> list[dict[str, float]]:
    """One step of several adapters on one device with the same settings. Clears their gradients; returns metrics, one each."""
    grads = [adapter.grads for adapter in adapters]
    try:
        return _STEPS[type(params)](adapters, params)
    except BaseException:
        for adapter, grad in zip(adapters, grads, strict=True):
            adapter.grads = grad  # nothing was stepped: what had accumulated stays
        raise


def step(adapter: Adapter, params: AdamParams | DimuonParams) -> dict[str, float]:
    """The same for one adapter."""
    return step_together([adapter], params)[0]
