"""From sequence lengths to blocks: the unit that the scheduler places into micro-batches."""

from __future__ import annotations

import numpy as np

from spindle.scheduler._packing import first_fit_decreasing

__all__ = ["first_fit_decreasing", "make_blocks"]


def make_blocks(lengths: np.ndarray, budget_tokens: int, num_tokens: int | None = None) -> tuple[list[np.ndarray], list[int]]:
    """Split one request into blocks of at most ``budget_tokens`` (a longer sequence is a block alone).

    lengths: [D] int64; num_tokens: their sum, where it is known. Returns, per block, the ascending datum indices in it, and how many
    tokens it has. The blocks depend on this request alone, never on its neighbours: a block is computed, and its gradient summed, as one
    piece wherever it is placed, so its bits stay its own.
    """
    num_tokens = int(lengths.sum()) if num_tokens is None else num_tokens
    if num_tokens <= budget_tokens or len(lengths) == 1:
        return [np.arange(len(lengths))], [num_tokens]
    bin_of, bins = first_fit_decreasing(np.ascontiguousarray(lengths, dtype=np.int64), budget_tokens)
    order = np.argsort(bin_of, kind="stable")
    blocks = np.split(order, np.searchsorted(bin_of[order], np.arange(1, bins)))
    return blocks, [int(lengths[block].sum()) for block in blocks]
