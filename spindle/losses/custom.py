"""custom: a loss that a client traced, as a graph of allowed operations (graph.py) run on each datum; the losses are summed.

The graph maps (logprobs, inputs...) of one datum to (scalar loss, metrics), metrics named ``custom/<name>:sum`` or ``:mean`` (over datums).
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from spindle.errors import InvalidRequest
from spindle.losses.base import Loss
from spindle.losses.graph import Graph

__all__ = ["create_custom", "find_custom"]

MAX_LOSSES = 4096  # the least recently used goes first
_METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
_losses: OrderedDict[str, Loss] = OrderedDict()
_lock = threading.Lock()


def create_custom(name: str, inputs: Sequence[Mapping[str, Any]], graph: Mapping[str, Any], owner: str = "") -> str:
    """Register a traced loss; returns its loss id, the same for the same owner, inputs and graph.

    inputs: [{"name", "rank"}], ``logprobs`` first. graph: {"format": 1, "nodes": [...]}. Raises InvalidRequest for what is not allowed.
    """
    names: list[Any] = [i.get("name") for i in inputs]
    if not 1 <= len(names) <= 16 or names[0] != "logprobs" or len(set(names)) != len(names) or not all(isinstance(n, str) for n in names):
        raise InvalidRequest(f"inputs: got {names}; 1 to 16 distinct names, logprobs first, are allowed")
    ranks: dict[str, Any] = {i["name"]: i.get("rank") for i in inputs}
    for n, rank in ranks.items():
        if rank != ranks["logprobs"] or rank not in (1, 2):
            raise InvalidRequest(f"inputs: {n} has rank {rank}; here all inputs have the shape of target_tokens, rank 1 or 2")
    if graph.get("format", 1) != 1:
        raise InvalidRequest(f"graph: format {graph['format']!r} is not known; 1 is")
    try:
        compiled = Graph(graph.get("nodes", []), names)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, InvalidRequest):
            raise
        raise InvalidRequest(f"graph: a node has fields of the wrong type ({error})") from None
    text = json.dumps([owner, name, inputs, graph], sort_keys=True, default=str)
    loss_id = f"{owner}:loss:{hashlib.sha256(text.encode()).hexdigest()[:32]}"
    with _lock:
        _losses[loss_id] = _loss(name, compiled, names, ranks["logprobs"])
        while len(_losses) > MAX_LOSSES:
            _losses.popitem(last=False)
    return loss_id


def find_custom(loss_id: Any) -> Loss:
    """Raises InvalidRequest when there is no such loss."""
    with _lock:
        if loss_id not in _losses:
            raise InvalidRequest(f"loss_fn_config: loss_id {loss_id!r} is not known; create it with create_custom_loss in this session")
        _losses.move_to_end(loss_id)
        return _losses[loss_id]


def _loss(name: str, graph: Graph, inputs: list[str], rank: int) -> Loss:
    def each(p, given, sequences):
        """(loss, metrics) of every datum"""
        p, given = p.cpu(), {n: x.cpu() for n, x in given.items()}  # a bad index is an exception there, and the end of a GPU's process
        for a, b, width in zip(sequences.offsets[:-1], sequences.offsets[1:], sequences.widths, strict=True):
            if (width > 0) != (rank == 2):
                raise InvalidRequest(
                    f"target_tokens has shape {'[N, K]' if width else '[N]'} but loss {name!r} takes logprobs of rank {rank}"
                )
            values = {n: (p if n == "logprobs" else given[n])[a:b] for n in inputs}
            yield graph.run({n: v.view(-1, int(width)) for n, v in values.items()} if width else values)

    def fn(p, given, config, sequences):
        return torch.stack([loss.to(p.dtype) for loss, _ in each(p, given, sequences)])

    @torch.no_grad()
    def metrics(p, given, config, sequences):
        sums: dict[str, float] = {}
        for _, found in each(p, given, sequences):
            for key, value in found.items():
                if not _METRIC.fullmatch(key):
                    raise InvalidRequest(f"custom loss {name!r}: metric {key!r} must be named custom/<name>:sum or custom/<name>:mean")
                sums[key] = sums.get(key, 0.0) + float(value)
        return {k: v / len(sequences.widths) if k.endswith(":mean") else v for k, v in sums.items()}

    return Loss("custom", fn, tuple(inputs[1:]), defaults={"loss_id": ""}, whole_segment=True, metrics=metrics)
