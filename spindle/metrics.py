"""Putting the metrics of parts together, as the SDK puts those of its chunks together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["combine_metrics"]


def combine_metrics(parts: Sequence[tuple[dict[str, float], int]]) -> dict[str, float]:
    """Metrics of a whole request from those of its blocks, each with its number of datums; as the SDK combines its chunks.

    The reduction after the colon says how: mean is weighted by datums, slack is max minus mean, unique and hash2 pass the first / add up.
    """
    if len(parts) == 1:
        return dict(parts[0][0])
    weights = np.array([count for _, count in parts], dtype=np.float64)
    combined: dict[str, float] = {}
    for key in parts[0][0]:
        values = np.array([metrics[key] for metrics, _ in parts if key in metrics], dtype=np.float64)
        if len(values) != len(parts):
            continue
        match key.rpartition(":")[2]:
            case "mean":
                value = float(np.average(values, weights=weights))
            case "min":
                value = float(values.min())
            case "max":
                value = float(values.max())
            case "slack":
                value = float(values.max() - np.average(values, weights=weights))
            case "unique":
                value = float(values[0])
            case _:
                value = float(values.sum())
        combined[key] = value
    return combined
