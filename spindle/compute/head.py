"""The unembedding: logits for sampling, and logprobs with their gradient in row chunks, so that logits never exist whole.

A loss says at once what the gradient of a chunk's logprobs is when it looks at each token alone; its backward then reuses the chunk's
own softmax. Other losses see the whole segment first, and their weighted rows are computed again. Either way the backward visits only
rows whose gradient is not zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from spindle.compute.lora import MIN_ROWS, Update, add_gradients, add_update, window

__all__ = ["Head", "HeadTask"]

CHUNK_BYTES = {"cpu": 128 << 20, "cuda": 512 << 20}  # float32 logits held at once; larger is faster, slowly


@dataclass(slots=True)
class HeadTask:
    """One segment's part of the head.

    rows, cells: its ranges in the micro-batch. update: what its adapter adds to the unembedding, None when that is nothing.
    gradient: None for a forward-only segment, else called with logprobs [m] and their range [lo, hi) among the segment's cells ->
    dloss/dlogprob [m]. whole: call it once with all cells instead of chunk by chunk.
    """

    rows: slice
    cells: slice
    update: Update | None
    gradient: Callable[[torch.Tensor, int, int], torch.Tensor] | None
    whole: bool = False


class Head:
    """weight [V, H], bias [V] or None, path: its LoRA target name; logits are scale * (W h + b), then softcap * tanh(. / softcap)."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, path: str, scale: float = 1.0, softcap: float | None = None
    ) -> None:
        self.weight, self.bias, self.path, self.scale, self.softcap = weight, bias, path, scale, softcap

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor, updates: Iterable[Update], buffer: torch.Tensor | None = None) -> torch.Tensor:
        """hidden [n, H], updates over these rows -> float32 [n, V], in ``buffer`` [n or more, V] of the weight's dtype if given."""
        out = None if buffer is None else buffer[: hidden.shape[0]]
        out = torch.mm(hidden, self.weight.t(), out=out)
        if self.bias is not None:
            out += self.bias
        for u in updates:
            add_update(hidden, out, u)
        out = out.float()
        if self.scale != 1.0:
            out.mul_(self.scale)
        return out if self.softcap is None else out.div_(self.softcap).tanh_().mul_(self.softcap)

    @torch.no_grad()
    def run(
        self, hidden: torch.Tensor, tasks: Sequence[HeadTask], cell_rows: np.ndarray, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden [T, H]; tasks in row order; cell_rows [C]: the row of every cell; targets [C] int64 on hidden's device.

        Returns logprobs [C] float32 and dloss/dhidden [T, H]; adds to the tasks' unembedding gradients.
        """
        logprobs = torch.empty(len(cell_rows), device=hidden.device)
        dhidden = torch.zeros_like(hidden)
        row_of_cell = torch.from_numpy(cell_rows).to(hidden.device)
        vocab = self.weight.shape[0]
        chunk_rows = max(MIN_ROWS, CHUNK_BYTES.get(hidden.device.type, CHUNK_BYTES["cpu"]) // (4 * vocab))
        buffer = self.weight.new_empty(min(chunk_rows, hidden.shape[0]), vocab)
        for pieces in _chunks(tasks, chunk_rows):
            start, stop = pieces[0][1], pieces[-1][2]
            low, high = window(start, stop, hidden.shape[0])
            updates = [task.update._replace(start=a - low, stop=b - low) for task, a, b in pieces if task.update]
            c0, c1 = np.searchsorted(cell_rows, (start, stop))
            scores, slope = self._log_softmax(hidden[low:high], updates, buffer)
            torch.take(scores, (row_of_cell[c0:c1] - low) * scores.shape[1] + targets[c0:c1], out=logprobs[c0:c1])
            now = [(task, *np.searchsorted(cell_rows, (a, b))) for task, a, b in pieces if task.gradient and not task.whole]
            if now:
                g = torch.zeros(c1 - c0, device=hidden.device)
                for task, a, b in now:
                    g[a - c0 : b - c0] = task.gradient(logprobs[a:b], a - task.cells.start, b - task.cells.start)
                self._backward(scores, slope, low, g, row_of_cell[c0:c1], targets[c0:c1], hidden, dhidden, pieces)
        for task in tasks:
            if task.gradient and task.whole:
                g = task.gradient(logprobs[task.cells], 0, task.cells.stop - task.cells.start)
                self._again(task, g, row_of_cell[task.cells], targets[task.cells], hidden, dhidden, buffer)
        return logprobs, dhidden

    def _log_softmax(
        self, hidden: torch.Tensor, updates: Iterable[Update], buffer: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-softmax [n, V], and with a softcap the slope of the cap [n, V]."""
        scores = self.logits(hidden, updates, buffer)
        slope = None if self.softcap is None else 1.0 - (scores / self.softcap).square_()
        return torch.log_softmax(scores, -1, out=scores), slope

    def _again(self, task: HeadTask, g, rows, targets, hidden, dhidden, buffer) -> None:
        """Backward of a task whose gradient was known only after all its logprobs: compute its weighted rows a second time."""
        used = torch.unique_consecutive(rows[g != 0])
        for part in used.split(len(buffer)) if len(used) else ():
            h = hidden[F.pad(part, (0, max(0, MIN_ROWS - len(part))), value=int(part[0]))]
            scores, slope = self._log_softmax(h, [task.update._replace(start=0, stop=len(part))] if task.update else [], buffer)
            cells = (g != 0) & (rows >= part[0]) & (rows <= part[-1])
            local = torch.searchsorted(part, rows[cells])
            dpart = torch.zeros_like(h)
            self._backward(scores, slope, 0, g[cells], local, targets[cells], h, dpart, [(task, 0, len(part))])
            dhidden[part] = dpart[: len(part)]

    def _backward(self, scores, slope, low: int, g, rows, targets, hidden, dhidden, pieces) -> None:
        """scores: log-softmax of hidden's rows from ``low`` on, overwritten. g, rows, targets: per cell, in row order."""
        weighted = g.nonzero()[:, 0]
        if not len(weighted):
            return
        g, targets = g[weighted], targets[weighted]
        used, index = torch.unique_consecutive(rows[weighted], return_inverse=True)
        keep = used - low
        every = len(used) == scores.shape[0]
        d = scores if every else scores[keep]  # becomes dloss/dlogits
        total = torch.zeros(len(used), device=g.device).index_add_(0, index, g)
        d.exp_().mul_(-total[:, None]).view(-1).index_add_(0, index * d.shape[1] + targets, g)
        if slope is not None:
            d.mul_(slope if every else slope[keep])
        if self.scale != 1.0:
            d.mul_(self.scale)
        d = d.to(self.weight.dtype)
        padded = d if len(used) >= MIN_ROWS else F.pad(d, (0, 0, 0, MIN_ROWS - len(used)))
        dh = (padded @ self.weight)[: len(used)]
        host_rows = used.cpu().numpy()
        for task, a, b in pieces:
            i, j = np.searchsorted(host_rows, (a, b))
            if task.update and i < j:
                h = hidden[used[i:j]]
                z = torch.mm(h, task.update.a.t()).mul_(task.update.scale)
                add_gradients(h, z, d[i:j], dh[i:j], task.update)
        dhidden[used] = dh


def _chunks(tasks: Sequence[HeadTask], chunk_rows: int) -> Iterator[list[tuple[HeadTask, int, int]]]:
    """Runs of (task, first row, last row + 1). A task is cut at multiples of ``chunk_rows`` from its own first row, so that sums over
    its pieces do not depend on its neighbours; whole pieces then share a chunk while they fit."""
    chunk: list[tuple[HeadTask, int, int]] = []
    for task in tasks:
        for a in range(task.rows.start, task.rows.stop, chunk_rows):
            b = min(a + chunk_rows, task.rows.stop)
            if chunk and b - chunk[0][1] > chunk_rows:
                yield chunk
                chunk = []
            chunk.append((task, a, b))
    if chunk:
        yield chunk
