"""Metrics of several parts of one request, put together as a Tinker client puts together its chunks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

__all__ = ["combine"]


def combine(parts: Iterable[tuple[Mapping[str, float], int]]) -> dict[str, float]:
    """parts: (metrics, number of datums) of each. Keys are ``name:reduction``; a mean weighs each part by its datums.

    Keys that not every part has are dropped, as the client does.
    """
    parts = list(parts)
    if len(parts) == 1:
        return dict(parts[0][0])
    out = {}
    for key in parts[0][0] if parts else ():
        if not all(key in metrics for metrics, _ in parts):
            continue
        values = [metrics[key] for metrics, _ in parts]
        reduction = key.rsplit(":", 1)[1]
        if reduction == "mean":
            out[key] = sum(v * n for v, (_, n) in zip(values, parts, strict=True)) / sum(n for _, n in parts)
        else:
            out[key] = {"sum": sum, "min": min, "max": max}[reduction](values)
    return out
