"""A micro-batch too big for the device's memory: run as two halves, cut between sequences, and put together again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from spindle.compute.batch import MicroBatch, Segment, SegmentResult
from spindle.metrics import combine_metrics

__all__ = ["run_within_memory"]

logger = logging.getLogger("spindle")


def run_within_memory(run: Callable[[MicroBatch], list[SegmentResult]], batch: MicroBatch) -> list[SegmentResult]:
    """``run(batch)``; when the device runs out of memory, the same of its halves, down to single sequences.

    One result per segment of ``batch``, in order. Raises torch.OutOfMemoryError when one sequence alone does not fit.
    """
    try:
        return run(batch)
    except torch.OutOfMemoryError:
        if len(batch.lengths) == 1:
            raise
    logger.warning("out of memory with %d tokens in %d sequences; running them in two halves", len(batch.tokens), len(batch.lengths))
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    ends = np.cumsum(batch.lengths)
    middle = int(np.clip(np.searchsorted(ends, ends[-1] / 2), 0, len(ends) - 2)) + 1
    results: dict[int, list[tuple[SegmentResult, int]]] = {}
    for first, last in ((0, middle), (middle, len(batch.lengths))):
        half, whole = part_of(batch, first, last)
        for result, segment in zip(run_within_memory(run, half), whole, strict=True):
            seqs = result.segment.seqs
            results.setdefault(id(segment), []).append((replace(result, segment=segment), seqs.stop - seqs.start))
    return [_together(results[id(segment)]) for segment in batch.segments]


def part_of(batch: MicroBatch, first: int, last: int) -> tuple[MicroBatch, list[Segment]]:
    """The sequences [first, last) as a micro-batch, and for each of its segments the one of ``batch`` that it is (a part of)."""
    row = np.concatenate([[0], np.cumsum(batch.lengths)])
    cell = np.concatenate([[0], np.cumsum(batch.lengths * np.maximum(batch.widths, 1))])
    parts, whole = [], []
    for s in batch.segments:
        lo, hi = max(s.seqs.start, first), min(s.seqs.stop, last)
        if lo >= hi:
            continue
        own = slice(int(cell[lo] - s.cells.start), int(cell[hi] - s.cells.start))
        parts.append(
            replace(
                s,
                seqs=slice(lo - first, hi - first),
                rows=slice(int(row[lo] - row[first]), int(row[hi] - row[first])),
                cells=slice(int(cell[lo] - cell[first]), int(cell[hi] - cell[first])),
                inputs={name: values[own] for name, values in s.inputs.items()},
                listed=None if s.listed is None else s.listed[(s.listed >= own.start) & (s.listed < own.stop)] - own.start,
            )
        )
        whole.append(s)
    rows, cells = slice(row[first], row[last]), slice(cell[first], cell[last])
    part = MicroBatch(batch.tokens[rows], batch.targets[cells], batch.lengths[first:last], batch.widths[first:last], parts)
    return part, whole


def _together(parts: list[tuple[SegmentResult, int]]) -> SegmentResult:
    """One segment's result from those of its parts, each with its number of sequences."""
    first = parts[0][0]
    if len(parts) == 1:
        return first
    error = next((result.error for result, _ in parts if result.error is not None), None)
    if error is not None:
        return replace(first, metrics={}, grad=None, error=error)
    grad = first.grad
    for result, _ in parts[1:]:
        if grad is not None and result.grad is not None:
            grad = grad.add_(result.grad)
    metrics = combine_metrics([(result.metrics, count) for result, count in parts])
    return replace(first, logprobs=torch.cat([result.logprobs for result, _ in parts]), metrics=metrics, grad=grad)
