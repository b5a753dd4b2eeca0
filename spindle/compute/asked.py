"""Which rows and cells of a micro-batch the head is asked for: all of them, or without those that their requests do not list.

The head then sees packed rows and cells as ever, only fewer. What it computes of a row depends on no other row, so the listed cells get
the bits that they get without skipping, and a segment's chunks are cut by its own asked rows alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from spindle.compute.batch import MicroBatch
from spindle.compute.head import Head, HeadTask
from spindle.compute.lora import MIN_ROWS

__all__ = ["Asked"]


@dataclass(slots=True)
class Asked:
    """rows [R], cells [A]: which of the micro-batch's, in order; None: all. cell_rows [A]: the place in ``rows`` of each asked cell's row.
    rows_of, cells_of: the part of every segment among them. total: cells of the micro-batch."""

    rows: torch.Tensor | None
    cells: torch.Tensor | None
    cell_rows: np.ndarray
    rows_of: Sequence[slice]
    cells_of: Sequence[slice]
    total: int

    @classmethod
    def of(cls, batch: MicroBatch) -> Asked:
        segments = batch.segments
        cell_rows = np.repeat(np.arange(len(batch.tokens)), np.repeat(np.maximum(batch.widths, 1), batch.lengths))
        if all(s.listed is None for s in segments):
            return cls(None, None, cell_rows, [s.rows for s in segments], [s.cells for s in segments], len(cell_rows))
        cells = np.concatenate([np.arange(s.cells.start, s.cells.stop) if s.listed is None else s.cells.start + s.listed for s in segments])
        rows, place = np.unique(cell_rows[cells], return_inverse=True)
        rows_of = [slice(*np.searchsorted(rows, (s.rows.start, s.rows.stop)).tolist()) for s in segments]
        cells_of = [slice(*np.searchsorted(cells, (s.cells.start, s.cells.stop)).tolist()) for s in segments]
        return cls(torch.from_numpy(rows), torch.from_numpy(cells), place, rows_of, cells_of, len(cell_rows))

    def run(self, head: Head, hidden: torch.Tensor, tasks: Sequence[HeadTask], targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``Head.run``: hidden [T, H], targets [C] -> logprobs [A] and dloss/dhidden [T, H], 0 in rows that are not asked."""
        if self.rows is None or self.cells is None:
            return head.run(hidden, tasks, self.cell_rows, targets)
        rows, count = self.rows.to(hidden.device), len(self.rows)
        padding = rows.new_zeros(max(0, MIN_ROWS - count))  # a row keeps its bits only from MIN_ROWS rows up
        logprobs, dasked = head.run(hidden[torch.cat([rows, padding])], tasks, self.cell_rows, targets[self.cells.to(targets.device)])
        dhidden = torch.zeros_like(hidden)
        dhidden[rows] = dasked[:count]
        return logprobs, dhidden

    def spread(self, logprobs: torch.Tensor) -> torch.Tensor:
        """[A] -> [C], 0 in cells that are not asked."""
        if self.cells is None:
            return logprobs
        return logprobs.new_zeros(self.total).index_copy_(0, self.cells.to(logprobs.device), logprobs)
