"""custom: a loss that a client traced, as a graph of allowed operations (graph.py) run on each datum; the losses are summed.

The graph maps (logprobs, inputs...) of one datum to (scalar loss, metrics), metrics named ``custom/<name>:sum`` or ``:mean`` (over datums).
An input has the rank it was declared with: 0 one number, 1 ``[N]``, 2 ``[N, K]``; logprobs the shape of target_tokens.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from spindle.errors import InvalidRequest
from spindle.losses.base import Loss
from spindle.losses.graph import Graph

if TYPE_CHECKING:
    from spindle.codec import ScannedRequest

__all__ = ["CustomLimits", "CustomLosses", "check_custom_owner", "create_custom", "find_custom"]

_METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")


@dataclass(frozen=True)
class CustomLimits:
    """max_work: element-operations (``Graph.work``) of one request's forward, over all its datums; 2^32 are seconds of one core."""

    max_work: int = 1 << 32
    max_graph_bytes: int = 1 << 17  # of one loss as JSON
    max_losses_per_owner: int = 256
    max_losses: int = 4096


def _unknown(loss_id: Any) -> InvalidRequest:
    return InvalidRequest(f"loss_fn_config: loss_id {loss_id!r} is not known; create it with create_custom_loss")


class CustomLosses:
    """Registered losses by id. Past an owner's bound, that owner's least recently used goes; past the bound of all, the least recently
    used of the owner who has most: nobody loses one to another who has more."""

    def __init__(self) -> None:
        self._owners: dict[str, OrderedDict[str, Loss]] = {}
        self._owner_of: dict[str, str] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._owner_of)

    def add(self, loss_id: str, loss: Loss, owner: str, limits: CustomLimits) -> None:
        with self._lock:
            self._drop(loss_id)
            own = self._owners.setdefault(owner, OrderedDict())
            own[loss_id] = loss
            self._owner_of[loss_id] = owner
            if len(own) > limits.max_losses_per_owner:
                self._drop(next(iter(own)))
            if len(self._owner_of) > limits.max_losses:
                most = max(self._owners.values(), key=lambda losses: len(losses))
                self._drop(next(iter(most)))

    def find(self, loss_id: Any) -> Loss:
        """Raises InvalidRequest when there is no such loss."""
        with self._lock:
            owner = self._owner_of.get(loss_id)
            if owner is None:
                raise _unknown(loss_id)
            self._owners[owner].move_to_end(loss_id)
            return self._owners[owner][loss_id]

    def check_owner(self, request: ScannedRequest, owner: str) -> None:
        """Raises InvalidRequest when the loss it names is another owner's; those made in process, by nobody, are everyone's."""
        loss_id = dict(request.loss_fn_config).get("loss_id") if request.loss_fn == "custom" else None
        with self._lock:
            if self._owner_of.get(loss_id, owner) not in (owner, ""):  # type: ignore[arg-type]
                raise InvalidRequest(str(_unknown(loss_id)), request.model_id, request.seq_id)

    def _drop(self, loss_id: str) -> None:
        owner = self._owner_of.pop(loss_id, None)
        if owner is not None:
            del self._owners[owner][loss_id]
            if not self._owners[owner]:
                del self._owners[owner]


_losses = CustomLosses()
find_custom = _losses.find
check_custom_owner = _losses.check_owner


def create_custom(
    name: str,
    inputs: Sequence[Mapping[str, Any]],
    graph: Mapping[str, Any],
    session: str = "",
    owner: str = "",
    limits: CustomLimits = CustomLimits(),
) -> str:
    """Register a traced loss; returns its loss id, the same for the same session, inputs and graph.

    inputs: [{"name", "rank"}], ``logprobs`` first. graph: {"format": 1, "nodes": [...]}. owner: whose place in the table it takes.
    Raises InvalidRequest for what is not allowed.
    """
    try:
        text = json.dumps([session, name, inputs, graph], sort_keys=True, default=str)
    except (RecursionError, TypeError, ValueError) as error:
        raise InvalidRequest(f"graph: cannot be read ({type(error).__name__})") from None
    if len(text) > limits.max_graph_bytes:
        raise InvalidRequest(f"graph: has {len(text)} bytes; at most {limits.max_graph_bytes} are allowed")
    names: list[Any] = [i.get("name") for i in inputs]
    if not 1 <= len(names) <= 16 or names[0] != "logprobs" or not all(isinstance(n, str) for n in names) or len(set(names)) != len(names):
        raise InvalidRequest(f"inputs: got {names}; 1 to 16 distinct names, logprobs first, are allowed")
    ranks: dict[str, Any] = {i["name"]: i.get("rank") for i in inputs}
    for n, rank in ranks.items():
        allowed = (1, 2) if n == "logprobs" else (0, 1, 2)
        if type(rank) is not int or rank not in allowed:
            raise InvalidRequest(f"inputs: {n} has rank {rank}; allowed are {', '.join(map(str, allowed))}")
    if graph.get("format", 1) != 1:
        raise InvalidRequest(f"graph: format {graph['format']!r} is not known; 1 is")
    try:
        compiled = Graph(graph.get("nodes", []), names)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, InvalidRequest):
            raise
        raise InvalidRequest(f"graph: a node has fields of the wrong type ({error})") from None
    loss_id = f"{session}:loss:{hashlib.sha256(text.encode()).hexdigest()[:32]}"
    _losses.add(loss_id, _loss(name, compiled, ranks, limits.max_work), owner, limits)
    return loss_id


class _Known(torch.autograd.Function):
    """Losses [s] of datums whose gradient with respect to p is known already, so that no datum's graph outlives its own run."""

    @staticmethod
    def forward(ctx, p, losses, gradient, datum_of_cell):
        ctx.save_for_backward(gradient, datum_of_cell)
        return losses

    @staticmethod
    def backward(ctx, dlosses):
        gradient, datum_of_cell = ctx.saved_tensors
        return gradient * dlosses[datum_of_cell], None, None, None


def _loss(name: str, graph: Graph, ranks: Mapping[str, int], max_work: int) -> Loss:
    rank = ranks["logprobs"]

    def check_rank(widths: np.ndarray) -> None:
        if len(wrong := widths[(widths > 0) != (rank == 2)]):
            raise InvalidRequest(
                f"target_tokens has shape {'[N, K]' if wrong[0] else '[N]'} but loss {name!r} takes logprobs of rank {rank}"
            )

    def each(p: torch.Tensor, given: Mapping[str, torch.Tensor], sequences) -> Iterator[tuple[slice, torch.Tensor, Any]]:
        """(cells, their logprobs as a leaf, (loss, metrics)) of every datum; inputs lie beside the cells, as codec.spread_input says.

        On the host: a bad index is an exception there, and the end of a GPU's process.
        """
        check_rank(sequences.widths)
        host = {n: x.cpu() for n, x in given.items()}
        logprobs = p.detach().cpu()
        for a, b, width in zip(sequences.offsets[:-1], sequences.offsets[1:], sequences.widths, strict=True):
            leaf = logprobs[a:b].clone().requires_grad_(p.requires_grad)
            values = {}
            for n, r in ranks.items():
                x = leaf if n == "logprobs" else host[n][a:b]
                rows = x.view(-1, int(width)) if width and x.dim() == 1 else x
                values[n] = x[0] if r == 0 else rows[:, 0] if r == 1 and width else rows
            yield slice(a, b), leaf, graph.run(values)

    def fn(p, given, config, sequences):
        losses, gradient = torch.zeros(len(sequences.widths)), torch.zeros(len(p))
        for at, (cells, leaf, (loss, _)) in enumerate(each(p, given, sequences)):
            losses[at] = loss.detach()
            if loss.requires_grad:
                gradient[cells] = torch.autograd.grad(loss, leaf)[0]
        return _Known.apply(p, losses.to(p.device), gradient.to(p.device), sequences.datum_of_cell(p.device))

    @torch.no_grad()
    def metrics(p, given, config, sequences):
        sums: dict[str, float] = {}
        for _, _, (_, found) in each(p, given, sequences):
            for key, value in found.items():
                if not _METRIC.fullmatch(key):
                    raise InvalidRequest(f"custom loss {name!r}: metric {key!r} must be named custom/<name>:sum or custom/<name>:mean")
                sums[key] = sums.get(key, 0.0) + float(value)
        return {k: v / len(sequences.widths) if k.endswith(":mean") else v for k, v in sums.items()}

    def check_work(lengths: np.ndarray, target_widths: np.ndarray, input_widths: Mapping[str, np.ndarray]) -> None:
        check_rank(np.maximum(target_widths, 0))
        overhead = len(lengths) * graph.overhead
        if overhead > max_work:
            raise InvalidRequest(_too_much(name, overhead, max_work, f"{len(graph.nodes)} nodes on each of {len(lengths)} datums"))
        columns = np.stack([target_widths, *(input_widths[n] for n in ranks if n != "logprobs")], axis=1)
        total, largest = 0, (0, 0)
        for (n, *widths), count in Counter(map(tuple, np.column_stack([lengths, columns]).tolist())).items():
            shapes = [() if r == 0 else (n,) if r == 1 else (n, max(k, 1)) for r, k in zip(ranks.values(), widths, strict=True)]
            work = graph.work(shapes)
            total, largest = total + work * count, max(largest, (work, n))
            if total > max_work:
                raise InvalidRequest(_too_much(name, total, max_work, f"{largest[0]} of them for a datum of {largest[1]} tokens"))

    return Loss(
        "custom",
        fn,
        tuple(ranks)[1:],
        defaults={"loss_id": ""},
        whole_segment=True,
        metrics=metrics,
        ranks={n: r for n, r in ranks.items() if n != "logprobs"},
        check_work=check_work,
    )


def _too_much(name: str, work: int, allowed: int, why: str) -> str:
    bound = f"at most {allowed} are allowed: send fewer or shorter datums"
    return f"custom loss {name!r} needs {work} element-operations or more ({why}); {bound}"
