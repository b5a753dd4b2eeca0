"""A linear layer whose rows belong to several adapters: one base product for all, then the low-rank update of each row group.

Exactness: a row of a matrix product keeps its bits whatever the other rows are, from MIN_ROWS rows up (tests/compute/test_exact.py
checks it on the machine at hand). So a group smaller than that computes over a window of its neighbours' rows as well and keeps only
its own; and every sum over rows (the gradients of A and B) runs over the rows of one group alone.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from spindle.compute.adapter import AdapterWeights, views

__all__ = ["MIN_ROWS", "LoraLinear", "Route", "RowGroup", "window"]

MIN_ROWS = 16


class RowGroup(NamedTuple):
    """Rows [start, stop) use ``weights`` (None: the bare base model). grad: flat float32 [P] that their gradient is added to."""

    start: int
    stop: int
    weights: AdapterWeights | None
    grad: torch.Tensor | None = None


def window(start: int, stop: int, total: int) -> tuple[int, int]:
    """At least MIN_ROWS rows (if there are as many) that contain [start, stop)."""
    if stop - start >= MIN_ROWS:
        return start, stop
    low = max(0, min(start, total - MIN_ROWS))
    return low, min(low + MIN_ROWS, total)


class Route:
    """Which rows of the current forward pass belong to which adapter. ``anchor`` makes outputs require a gradient though no weight does."""

    def __init__(self, groups: Sequence[RowGroup], device: torch.device | str = "cpu") -> None:
        self.groups = [g for g in (RowGroup(*g) for g in groups) if g.weights is not None and g.stop > g.start]
        self.grads = [None if g.grad is None else views(g.grad, g.weights.layout) for g in self.groups]
        self.anchor = torch.zeros((), device=device, requires_grad=any(g.grad is not None for g in self.groups))

    def trains(self, path: str) -> bool:
        return any(grads is not None and path in grads for grads in self.grads)


class Router(threading.local):
    """The route of the forward pass that this thread runs, so that sampling and training may share one replica."""

    route: Route | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> Router:
        return memo.setdefault(id(self), Router())  # type: ignore[return-value]


def _forward(x: torch.Tensor, layer: LoraLinear, route: Route) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """x [T, in] -> y [T, out] and, per group that adapts this layer, z = x A^T [rows, rank]."""
    y = F.linear(x, layer.weight, layer.bias)
    hidden = []
    for g in route.groups:
        pair = g.weights.matrices.get(layer.path)
        if pair is None:
            continue
        a, b = pair
        if g.stop - g.start >= MIN_ROWS:
            z = x[g.start : g.stop] @ a.t()
            y[g.start : g.stop].addmm_(z, b.t(), alpha=g.weights.scale)
        else:
            low, high = window(g.start, g.stop, x.shape[0])
            own = slice(g.start - low, g.stop - low)
            z = x[low:high] @ a.t()
            y[g.start : g.stop].add_((z @ b.t())[own], alpha=g.weights.scale)
            z = z[own]
        hidden.append(z)
    return y, hidden


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, anchor, layer, route):
        y, hidden = _forward(x, layer, route)
        ctx.save_for_backward(x, *hidden)
        ctx.layer, ctx.route = layer, route
        return y

    @staticmethod
    def backward(ctx, dy):
        x, *hidden = ctx.saved_tensors
        layer, route = ctx.layer, ctx.route
        dy = dy.contiguous()
        dx = dy @ layer.weight if ctx.needs_input_grad[0] else None
        hidden = iter(hidden)
        for g, grads in zip(route.groups, route.grads, strict=True):
            pair = g.weights.matrices.get(layer.path)
            if pair is None:
                continue
            a, b = pair
            z = next(hidden)
            low, high = window(g.start, g.stop, dy.shape[0])
            own = slice(g.start - low, g.stop - low)
            dz = dy[low:high] @ b
            if dx is not None:
                if high - low == g.stop - g.start:
                    dx[low:high].addmm_(dz, a, alpha=g.weights.scale)
                else:
                    dx[g.start : g.stop].add_((dz @ a)[own], alpha=g.weights.scale)
            if grads is not None:
                da, db = grads[layer.path]
                add_product(da, dz[own].t(), x[g.start : g.stop], g.weights.scale)
                add_product(db, dy[g.start : g.stop].t(), z, g.weights.scale)
        return dx, None, None, None


def add_product(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> None:
    """out += scale * a @ b, where ``out`` is float32 whatever the others are."""
    if a.dtype == out.dtype:
        out.addmm_(a, b, alpha=scale)
    else:
        out.add_(a @ b, alpha=scale)


class LoraLinear(nn.Module):
    """Takes the place of an ``nn.Linear`` (and shares its tensors). Without a route it computes what that did."""

    def __init__(self, linear: nn.Linear, path: str, router: Router) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.path, self._router = path, router

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> [..., out]; all leading dimensions together are the rows of the route."""
        route = self._router.route
        if route is None or not route.groups:
            return F.linear(x, self.weight, self.bias)
        rows = x.reshape(-1, self.in_features)
        if torch.is_grad_enabled() and (x.requires_grad or route.trains(self.path)):
            y = _Function.apply(rows, route.anchor, self, route)
        else:
            y, _ = _forward(rows, self, route)
        return y.view(*x.shape[:-1], self.out_features)
