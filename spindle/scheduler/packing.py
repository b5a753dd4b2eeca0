"""From sequence lengths to blocks: the unit that the scheduler places into micro-batches."""

from __future__ import annotations

import numpy as np

from spindle.scheduler._packing import first_fit_decreasing

__all__ = ["first_fit_decreasing", "make_blocks"]


def make_blocks(lengths: np.ndarray, budget_tokens: int) -> list[np.ndarray]:
    """Split one request into blocks of at most ``budget_tokens`` (a longer sequence is a block alone).

    lengths: [D] int64. Returns, per block, the ascending datum indices in it. The blocks depend on this request alone, never on
    its neighbours: a block is computed, and its gradient summed, as one piece wherever it is placed, so its bits stay its own.
    """
    lengths = np.ascontiguousarray(lengths, dtype=np.int64)
    if len(lengths) == 1 or lengths.sum() <= budget_tokens:
        return [np.arange(len(lengths))]
    bin_of, bins = first_fit_decreasing(lengths, budget_tokens)
    order = np.argsort(bin_of, kind="stable")
    return np.split(order, np.searchsorted(bin_of[order], np.arange(1, bins)))
