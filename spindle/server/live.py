"""What lives in memory while the server runs: sessions, the adapters they train, the samplers they opened."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from spindle.errors import InvalidRequest, NotFound

__all__ = ["LiveModel", "LiveSampler", "LiveSession", "Published", "Weights"]


@dataclass(slots=True, eq=False, weakref_slot=True)
class Weights:
    """What a sampler samples from. Snapshots share one of these when they are in flight: publishing again moves them all.

    snapshot: the engine's; None with ``base`` is the base model, None without it means that the weights were dropped for room.
    """

    snapshot: Any = None
    base: bool = False
    nbytes: int = 0


@dataclass(slots=True, eq=False)
class LiveModel:
    """An adapter in the engine. ``last_request_at`` is written to the catalogue when it leaves memory."""

    model_id: str
    session_id: str
    owner: str
    base_model: str
    lora_rank: int
    optimizer: dict[str, Any]
    last_request_at: float
    inflight: Weights = field(default_factory=Weights)
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=500))  # per token, of each forward_backward


MAX_POLLED, MAX_UNPOLLED = 100_000, 4_096  # completions kept per sampling client


@dataclass(slots=True)
class Completion:
    cursor: int
    request_id: str
    failed: bool
    nbytes: int


@dataclass(slots=True, eq=False)
class Channel:
    """Completions of one sampling client, for retrieve_futures. Seen ones are trimmed; the oldest go past a bound.

    Most clients never ask: until one does, only the newest few are kept.
    """

    completions: deque[Completion] = field(default_factory=deque)
    cursor: int = 0
    waiters: list[asyncio.Future] = field(default_factory=list)
    polled: bool = False

    def add(self, request_id: str, failed: bool, nbytes: int) -> None:
        self.cursor += 1
        self.completions.append(Completion(self.cursor, request_id, failed, nbytes))
        if len(self.completions) > (MAX_POLLED if self.polled else MAX_UNPOLLED):
            self.completions.popleft()
        self.wake()

    def wake(self) -> None:
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(None)
        self.waiters.clear()

    def after(self, cursor: int) -> list[Completion]:
        self.polled = True
        while self.completions and self.completions[0].cursor <= cursor:
            self.completions.popleft()
        return list(self.completions)

    async def wait(self, timeout_s: float) -> None:
        """Return at the next completion, or after ``timeout_s``."""
        waiter = asyncio.get_running_loop().create_future()
        self.waiters.append(waiter)
        try:
            async with asyncio.timeout(timeout_s):
                await waiter
        except TimeoutError:
            if waiter in self.waiters:  # else a completion came in the same turn of the loop
                self.waiters.remove(waiter)


@dataclass(slots=True, eq=False)
class LiveSampler:
    sampler_id: str
    session_id: str
    owner: str
    base_model: str
    model_path: str | None
    weights: Weights
    channels: dict[int, Channel] = field(default_factory=dict)

    def channel(self, clone: int) -> Channel:
        """The completions of clone ``seq_id // 1_000_000_000``."""
        found = self.channels.get(clone)
        if found is None:
            if len(self.channels) >= 10_000:
                raise InvalidRequest(f"sampler {self.sampler_id} has {len(self.channels)} clients, as many as one may have")
            found = self.channels[clone] = Channel()
        return found


class LiveSession:
    """Kept alive by heartbeats: ``expire`` is called once ``timeout_s`` pass without one. One timer, re-armed only when it fires."""

    def __init__(self, session_id: str, owner: str, timeout_s: float, expire: Callable[[LiveSession], None]) -> None:
        self.session_id = session_id
        self.owner = owner
        self.models: set[str] = set()
        self.samplers: set[str] = set()
        self._loop = asyncio.get_running_loop()
        self._timeout_s = timeout_s
        self._expire = expire
        self._seen = self._loop.time()
        self._timer: asyncio.TimerHandle | None = self._loop.call_later(timeout_s, self._check)

    def touch(self) -> None:
        self._seen = self._loop.time()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        left = self._seen + self._timeout_s - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._check)
        else:
            self._timer = None
            self._expire(self)


class Published:
    """Weights published without a name, by key, oldest dropped first past ``max_bytes``.

    Nobody tells us when a sampler is not used any more.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.nbytes = 0
        self._held: OrderedDict[str, tuple[Weights, int]] = OrderedDict()

    def hold(self, key: str, weights: Weights) -> None:
        """Count ``weights`` as they are now; again under the same key when they were replaced."""
        _, before = self._held.pop(key, (None, 0))
        self._held[key] = (weights, weights.nbytes)
        self.nbytes += weights.nbytes - before
        while self.nbytes > self.max_bytes and len(self._held) > 1:
            self.release(next(iter(self._held)))

    def use(self, key: str) -> None:
        if key in self._held:
            self._held.move_to_end(key)

    def release(self, key: str) -> None:
        weights, nbytes = self._held.pop(key, (None, 0))
        self.nbytes -= nbytes
        if weights is not None:
            weights.snapshot = None


def usable(weights: Weights, sampler_id: str) -> Any:
    """The snapshot to sample from (None = the base model). Raises NotFound when it was dropped."""
    if weights.snapshot is None and not weights.base:
        raise NotFound(
            f"the weights of sampler {sampler_id} are no longer held: too many were published after them; "
            "save weights under a name to keep them"
        )
    return weights.snapshot
