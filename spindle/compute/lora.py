"""Linear maps whose rows belong to several adapters: one base product for all, then the low-rank update of each row group.

Exactness: a row of a matrix product keeps its bits whatever the other rows are, from MIN_ROWS rows up (tests/compute/test_exact.py
checks it on the machine at hand). So a group smaller than that computes over a window of its neighbours' rows as well and keeps only
its own; and every sum over rows (the gradients of A and B) runs over the rows of one group alone.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from spindle.compute.adapter import AdapterWeights, view

__all__ = [
    "MIN_ROWS",
    "Block",
    "LoraLinear",
    "Route",
    "Router",
    "RowGroup",
    "Update",
    "adapted",
    "add_gradients",
    "add_update",
    "window",
]

MIN_ROWS = 16


class RowGroup(NamedTuple):
    """Rows [start, stop) use ``weights`` (None: the bare base model). grad: flat float32 [P] that their gradient is added to."""

    start: int
    stop: int
    weights: AdapterWeights | None
    grad: torch.Tensor | None = None


class _Group(NamedTuple):
    """A RowGroup that has rows and an adapter, or one stage's part of it. whole: where ``grad`` belongs in the flat gradient."""

    start: int
    stop: int
    weights: AdapterWeights
    grad: torch.Tensor | None
    whole: torch.Tensor | None


def _parts(group: RowGroup, devices: Sequence[torch.device]) -> Iterator[_Group]:
    """A group per stage. A gradient is written on its stage's device: in its place in ``grad`` (on the first device), or beside it."""
    start, stop, weights, grad = group
    if weights is None or stop <= start:
        return
    for (offset, layout), device, part in zip(weights.layout.parts, devices, weights.on(devices), strict=True):
        if not layout.slots:
            continue
        whole = None if grad is None else grad[offset : offset + layout.numel]
        there = whole if whole is None or device == devices[0] else torch.empty_like(whole, device=device)
        yield _Group(start, stop, part, there, whole)


class Update(NamedTuple):
    """Rows [start, stop) get scale * B A x more.

    a [r, in], b [out, r]. da, db: where their gradients go, or None. written: the addresses of gradients that hold something already;
    the first product is stored, not added, so that fresh buffers need not be cleared.
    """

    start: int
    stop: int
    a: torch.Tensor
    b: torch.Tensor
    scale: float
    da: torch.Tensor | None
    db: torch.Tensor | None
    written: set[int]


class Block(NamedTuple):
    """Rows [start, stop) are multiplied by ``weight`` [out, in]; ``updates`` lie within them."""

    start: int
    stop: int
    weight: torch.Tensor
    bias: torch.Tensor | None
    updates: Sequence[Update]


def window(start: int, stop: int, total: int) -> tuple[int, int]:
    """At least MIN_ROWS rows (if there are as many) that contain [start, stop)."""
    if stop - start >= MIN_ROWS:
        return start, stop
    low = max(0, min(start, total - MIN_ROWS))
    return low, min(low + MIN_ROWS, total)


class Route:
    """Which rows of the current forward pass belong to which adapter. ``anchor`` makes outputs require a gradient though no weight does.

    devices: of the model's stages; adapters lie on the first. Gradient buffers of the groups may come uninitialized; ``finish`` after the
    backward clears what nothing was written to, and brings together what was written on other devices.
    """

    def __init__(self, groups: Sequence[RowGroup | tuple], devices: Sequence[torch.device] = (torch.device("cpu"),)) -> None:
        self.groups = [part for g in groups for part in _parts(RowGroup(*g), devices)]
        self.anchor = torch.zeros((), device=devices[0], requires_grad=any(g.grad is not None for g in self.groups))
        self.written: set[int] = set()
        self._updates: dict[str, list[Update]] = {}

    def updates(self, path: str) -> list[Update]:
        """What the groups add to the linear map of that name."""
        found = self._updates.get(path)
        if found is None:
            found = []
            for g in self.groups:
                if path in g.weights.matrices:
                    a, b = g.weights.matrices[path]
                    da, db = (None if g.grad is None else view(g.grad, slot) for slot in g.weights.layout.pairs[path])
                    found.append(Update(g.start, g.stop, a, b, g.weights.scale, da, db, self.written))
            self._updates[path] = found
        return found

    def finish(self) -> None:
        """Zero every gradient that no product was written to, and make the flat gradients whole."""
        for g in self.groups:
            if g.grad is None or g.whole is None:
                continue
            for slot in g.weights.layout.slots:
                if g.grad.data_ptr() + 4 * slot.offset not in self.written:
                    view(g.grad, slot).zero_()
            for start, stop in g.weights.layout.gaps:
                g.grad[start:stop].zero_()
            if g.grad is not g.whole:
                g.whole.copy_(g.grad)


class Router(threading.local):
    """The route of the forward pass that this thread runs, so that sampling and training may share one replica."""

    route: Route | None = None


def put_product(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, written: set[int]) -> None:
    """out (+)= a @ b, where ``out`` is float32 whatever the others are."""
    address = out.data_ptr()
    if address in written:
        out.addmm_(a, b) if a.dtype == out.dtype else out.add_(a @ b)
    else:
        torch.mm(a, b, out=out) if a.dtype == out.dtype else out.copy_(a @ b)
        written.add(address)


def add_update(x: torch.Tensor, y: torch.Tensor, u: Update) -> torch.Tensor:
    """y += the update of x, rows of one count; returns scale * x A^T of the update's rows."""
    if u.stop - u.start >= MIN_ROWS:
        z = torch.mm(x[u.start : u.stop], u.a.t()).mul_(u.scale)
        y[u.start : u.stop].addmm_(z, u.b.t())
        return z
    low, high = window(u.start, u.stop, x.shape[0])
    z = torch.mm(x[low:high], u.a.t()).mul_(u.scale)
    y[u.start : u.stop] += torch.mm(z, u.b.t())[u.start - low : u.stop - low]
    return z[u.start - low : u.stop - low]


def add_gradients(x: torch.Tensor, z: torch.Tensor, dy: torch.Tensor, dx: torch.Tensor | None, u: Update) -> None:
    """The update's backward over its own rows alone: x, z (as add_update gave it), dy, and dx which its part is added to."""
    dz = torch.mm(dy, u.b).mul_(u.scale)
    if dx is not None:
        dx.addmm_(dz, u.a)
    if u.da is not None and u.db is not None:
        put_product(u.da, dz.t(), x, u.written)
        put_product(u.db, dy.t(), z, u.written)


def _rows(x: torch.Tensor, updates: Sequence[Update]) -> Sequence[torch.Tensor]:
    """The rows of each update; in one call when they cover all rows in order, as they mostly do."""
    at = 0
    for u in updates:
        if u.start != at:
            return [x[u.start : u.stop] for u in updates]
        at = u.stop
    if at != x.shape[0]:
        return [x[u.start : u.stop] for u in updates]
    return x.split([u.stop - u.start for u in updates])


def _product(x: torch.Tensor, out: torch.Tensor, start: int, stop: int, matrix: torch.Tensor) -> None:
    """out[start:stop] = x[start:stop] @ matrix, over a window when the rows are few."""
    low, high = window(start, stop, x.shape[0])
    if (low, high) == (start, stop):
        torch.mm(x[start:stop], matrix, out=out[start:stop])
    elif stop > start:
        out[start:stop] = (x[low:high] @ matrix)[start - low : stop - low]


def _forward(x: torch.Tensor, blocks: Sequence[Block]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """x [T, in] -> y [T, out] and, per update, scale * x A^T [rows, rank]."""
    if len(blocks) == 1:
        y = F.linear(x, blocks[0].weight, blocks[0].bias)
    else:
        y = x.new_empty(x.shape[0], blocks[0].weight.shape[0])
        for block in blocks:
            _product(x, y, block.start, block.stop, block.weight.t())
    return y, [add_update(x, y, u) for block in blocks for u in block.updates]


class _Adapted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, anchor, blocks):
        y, hidden = _forward(x, blocks)
        ctx.save_for_backward(x, *hidden)
        ctx.blocks = blocks
        return y

    @staticmethod
    def backward(ctx, dy):
        x, *hidden = ctx.saved_tensors
        blocks, dy = ctx.blocks, dy.contiguous()
        dx = None
        if ctx.needs_input_grad[0]:
            if len(blocks) == 1:
                dx = dy @ blocks[0].weight
            else:
                dx = torch.empty_like(x)
                for block in blocks:
                    _product(dy, dx, block.start, block.stop, block.weight)
        updates = [u for block in blocks for u in block.updates]
        dxs = [None] * len(updates) if dx is None else _rows(dx, updates)
        for u, z, rows, dy_rows, dx_rows in zip(updates, hidden, _rows(x, updates), _rows(dy, updates), dxs, strict=True):
            add_gradients(rows, z, dy_rows, dx_rows, u)
        return dx, None, None


def adapted(x: torch.Tensor, blocks: Sequence[Block], route: Route) -> torch.Tensor:
    """x [T, in] -> [T, out]: each block's product with its updates. The blocks cover the rows, in order."""
    if torch.is_grad_enabled() and (x.requires_grad or any(u.da is not None for block in blocks for u in block.updates)):
        return _Adapted.apply(x, route.anchor, blocks)
    return _forward(x, blocks)[0]


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
        y = adapted(rows, [Block(0, rows.shape[0], self.weight, self.bias, route.updates(self.path))], route)
        return y.view(*x.shape[:-1], self.out_features)
