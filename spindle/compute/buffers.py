"""Host memory of micro-batches, used again and again: fresh memory is faulted in page by page, and pinned memory costs a call each time."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np
import torch

__all__ = ["BufferPool", "Buffers"]

KEPT = 3  # of either kind: of the micro-batch that runs, of the one filled meanwhile, and of the one whose results are handed out
KEPT_BYTES = 256 << 20
ZEROED_SHARE = 0.05  # of the cells: where more are to be written, writing all of them is less work than some and clearing those


@dataclass(slots=True, eq=False)
class Buffers:
    """One micro-batch's memory, at least as long as asked for.

    zeroed: targets and inputs are all zero bytes whenever they lie in the pool: who fills them clears them (``codec.clear``).
    """

    tokens: torch.Tensor  # int32
    targets: torch.Tensor  # int64
    inputs: torch.Tensor  # float32, of all segments and names
    zeroed: bool
    host: tuple[np.ndarray, np.ndarray, np.ndarray] = field(init=False)  # the three as numpy sees them

    def __post_init__(self) -> None:
        self.host = self.tokens.numpy(), self.targets.numpy(), self.inputs.numpy()

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.host)


class BufferPool:
    """The buffers of one device; pinned when it is a GPU. Bounded: three of either kind, and 256 MiB in all."""

    def __init__(self, pinned: bool) -> None:
        self.pinned = pinned
        self._kept: list[Buffers] = []
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Held now for the next micro-batch."""
        with self._lock:
            return sum(kept.nbytes for kept in self._kept)

    def take(self, tokens: int, targets: int, inputs: int, written: int) -> Buffers:
        """Memory for that many items. written: how many of the targets are not known to be zero (``ScannedRequest.written_cells``)."""
        zeroed = written <= ZEROED_SHARE * targets
        with self._lock:
            for i, kept in enumerate(self._kept):
                sizes = [part.size for part in kept.host]
                if kept.zeroed == zeroed and sizes[0] >= tokens and sizes[1] >= targets and sizes[2] >= inputs:
                    return self._kept.pop(i)
        return Buffers(self._new(tokens, torch.int32), self._new(targets, torch.int64), self._new(inputs, torch.float32), zeroed)

    def give_back(self, buffers: Buffers) -> None:
        """Once nothing reads them any more; zeroed ones cleared. What is not given back is freed."""
        with self._lock:
            alike = [kept for kept in self._kept if kept.zeroed == buffers.zeroed]
            if len(alike) == KEPT:
                self._kept.remove(alike[0])
            if sum(kept.nbytes for kept in self._kept) + buffers.nbytes <= KEPT_BYTES:
                self._kept.append(buffers)

    def _new(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        step = 1 << max(size.bit_length() - 4, 10)  # so that micro-batches of about one size share buffers
        size = -(-size // step) * step
        if self.pinned:
            return torch.zeros(size, dtype=dtype, pin_memory=True)
        return torch.from_numpy(np.zeros(size, str(dtype).removeprefix("torch.")))  # huge pages, zero until written
