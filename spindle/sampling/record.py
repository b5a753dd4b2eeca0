"""What was sampled, by sequence id, so that a later training request can name it instead of sending it."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from spindle.errors import NotFound

_OVERHEAD_BYTES = 256  # of one record beyond its two arrays, roughly


@dataclass(slots=True, frozen=True, eq=False)
class SampleRecord:
    """tokens: [n] int32. logprobs: [n] float32, at the temperature they were sampled at."""

    sequence_id: str
    session: str | None
    tokens: np.ndarray
    logprobs: np.ndarray
    recorded_at: float  # seconds of the store's clock

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes + self.logprobs.nbytes + _OVERHEAD_BYTES


class SampleRecords:
    """Records kept for ``keep_s`` seconds and at most ``max_bytes`` (per session: ``max_session_bytes``); the oldest go first.

    Safe to use from any thread.
    """

    def __init__(
        self,
        keep_s: float = 24 * 3600.0,
        max_bytes: int = 256 << 20,
        max_session_bytes: int = 64 << 20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keep_s, self._max_bytes, self._max_session_bytes, self._clock = keep_s, max_bytes, max_session_bytes, clock
        self._records: dict[str, SampleRecord] = {}
        self._sessions: dict[str | None, OrderedDict[str, SampleRecord]] = {}
        self._session_bytes: dict[str | None, int] = {}
        self._order: OrderedDict[str, None] = OrderedDict()
        self._nbytes = 0
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def __len__(self) -> int:
        return len(self._records)

    def add(self, sequence_id: str, tokens: np.ndarray, logprobs: np.ndarray, session: str | None = None) -> None:
        """Keep one finished sample. The same id again takes the old one's place."""
        record = SampleRecord(sequence_id, session, np.array(tokens, np.int32), np.array(logprobs, np.float32), self._clock())
        with self._lock:
            self._drop(sequence_id)
            self._records[sequence_id] = record
            self._order[sequence_id] = None
            self._sessions.setdefault(session, OrderedDict())[sequence_id] = record
            self._session_bytes[session] = self._session_bytes.get(session, 0) + record.nbytes
            self._nbytes += record.nbytes
            while self._session_bytes.get(session, 0) > self._max_session_bytes:
                self._drop(next(iter(self._sessions[session])))
            while self._nbytes > self._max_bytes:
                self._drop(next(iter(self._order)))
            self._expire()

    def get(self, sequence_id: str, session: str | None = None) -> SampleRecord:
        """The record of that id. Raises NotFound when there is none (any more), or it is another session's."""
        with self._lock:
            self._expire()
            record = self._records.get(sequence_id)
        if record is None or record.session != session:
            hours = self._keep_s / 3600
            raise NotFound(
                f"sequence_id {sequence_id!r} names no recorded sample of this session; samples are recorded when the sampling client "
                f"was made with record_stability_info=True, and kept for {hours:g} hours"
            )
        return record

    def forget_session(self, session: str | None) -> None:
        """Drop all records of a session."""
        with self._lock:
            for sequence_id in list(self._sessions.get(session, ())):
                self._drop(sequence_id)

    def _expire(self) -> None:
        limit = self._clock() - self._keep_s
        while self._order and self._records[first := next(iter(self._order))].recorded_at < limit:
            self._drop(first)

    def _drop(self, sequence_id: str) -> None:
        record = self._records.pop(sequence_id, None)
        if record is None:
            return
        del self._order[sequence_id]
        self._nbytes -= record.nbytes
        self._session_bytes[record.session] -= record.nbytes
        del self._sessions[record.session][sequence_id]
        if not self._sessions[record.session]:
            del self._sessions[record.session], self._session_bytes[record.session]
