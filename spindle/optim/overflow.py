"""A step that would leave float32's range is not taken.

How large the outcome can be follows from a few scalars: bounds on the entries of params and exp_avg, carried from step to step, and the
gradient's norm. As a rule that settles it, at no cost. The buffers are measured only when the carried bounds have grown too loose, or
something else than a step has written to them.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch

from spindle.compute.adapter import Adapter

__all__ = ["LIMIT", "Bounds", "bounds_after", "carry", "measure", "skip"]

LIMIT = 2.0**63  # of an entry: the square of a larger one is not finite in float32, nor would a product of B and A be


class Bounds(NamedTuple):
    """No entry of params, of exp_avg is larger."""

    params: float
    moment: float


_carried: weakref.WeakKeyDictionary[Adapter, tuple[tuple[int, ...], Bounds]] = weakref.WeakKeyDictionary()


def _versions(adapter: Adapter) -> tuple[int, ...]:
    return tuple(number for x in (adapter.params, adapter.exp_avg) for number in (id(x), x._version))


def carry(adapter: Adapter, bounds: Bounds) -> None:
    """Remember bounds on the buffers as they are now."""
    _carried[adapter] = _versions(adapter), bounds


def measure(*buffers: torch.Tensor) -> list[float]:
    """The largest magnitude in each; NaN when one entry is."""
    return torch.stack([torch.linalg.vector_norm(x, math.inf) if x.numel() else x.new_zeros(()) for x in buffers]).tolist()


def bounds_after(adapter: Adapter, grad_norm: float, params_after: Callable[[Bounds], float]) -> Bounds | None:
    """Bounds on the outcome of a step, or None when it may pass LIMIT.

    params_after: a bound on the entries of params after it, from one on those before it and one on the new exp_avg's.
    """
    versions, carried = _carried.get(adapter, ((), Bounds(math.inf, math.inf)))
    if versions == _versions(adapter) and (after := _after(carried, grad_norm, params_after)):
        return after
    return _after(Bounds(*measure(adapter.params, adapter.exp_avg)), grad_norm, params_after)


def _after(before: Bounds, grad_norm: float, params_after: Callable[[Bounds], float]) -> Bounds | None:
    moment = max(before.moment, grad_norm)  # the new one is a mean of the old one and the gradient
    after = Bounds(params_after(Bounds(before.params, moment)), moment)
    return after if after.params < LIMIT / 2 and after.moment < LIMIT / 2 else None  # NaN too is None


def skip(metrics: dict[str, float]) -> None:
    """Say that the step was not taken, and why."""
    metrics |= {"step_skipped": 1.0, "overflow": 1.0}
