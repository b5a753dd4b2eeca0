"""What waits in the scheduler: training requests cut into blocks, and operations that need their adapter to themselves."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from spindle.future import Future
from spindle.scheduler.packing import make_blocks


class Kind(enum.Enum):
    TRAIN = "train"  # forward or forward_backward: cut into blocks, may run beside its neighbours
    DEVICE = "device"  # optim_step, publish: alone on its adapter, on the adapter's home device
    IO = "io"  # save, load: alone on its adapter, on an I/O thread
    SKIP = "skip"  # a rejected request: takes its place in the order and nothing else


@dataclass(slots=True, eq=False)
class Item:
    """One request of one adapter. The scheduler reads everything but ``payload``, ``result`` and ``future``'s value."""

    model_id: str
    seq_id: int
    kind: Kind
    future: Future
    payload: Any = None
    fingerprint: bytes | None = None
    nbytes: int = 0
    blocks: list[np.ndarray] = field(default_factory=list)  # datum indices per block
    block_tokens: list[int] = field(default_factory=list)
    next_block: int = 0  # first block not yet handed out
    blocks_left: int = 0  # blocks not yet completed
    blocks_running: int = 0  # handed out and not yet completed
    started: bool = False
    failed: bool = False
    heavy: bool = False  # its answer holds memory: of those only the newest is kept for repeats
    queue: Any = None  # its AdapterQueue, and the client in whose account it counts: the scheduler's own
    account: Any = None
    result: Any = None  # the executor's running result
    queued_at: float = field(default_factory=time.monotonic)

    def cut(self, lengths: np.ndarray, budget_tokens: int, num_tokens: int | None = None) -> None:
        """Cut a TRAIN item into blocks. lengths: [D] int64 tokens per datum; num_tokens: their sum, where it is known."""
        self.blocks, self.block_tokens = make_blocks(lengths, budget_tokens, num_tokens)
        self.blocks_left = len(self.blocks)

    def drop_payload(self) -> None:
        """Free what only running needed; the item itself may stay to answer repeats."""
        self.payload = self.result = None
        self.blocks = []
        self.block_tokens = []


@dataclass(slots=True, eq=False)
class Block:
    """One block of one item, as handed to a device."""

    item: Item
    index: int

    @property
    def tokens(self) -> int:
        return self.item.block_tokens[self.index]

    @property
    def datums(self) -> np.ndarray:
        return self.item.blocks[self.index]

    def of(self, per_datum: np.ndarray) -> np.ndarray:
        """What belongs to its datums of a [D] array of the request."""
        return per_datum if len(self.item.blocks) == 1 else per_datum[self.datums]
