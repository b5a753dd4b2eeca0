"""What was submitted and its answer: request id -> future, long polls woken by events, memory bounded.

Lives on the server's event loop; only ``_finished`` runs elsewhere: in the thread that completes the engine's future, or one named for it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response

from spindle.errors import Cancelled, Conflict, NotFound, Overloaded, SpindleError, without_frames
from spindle.server.answers import describe, encode_json, log
from spindle.server.settings import ServerSettings

__all__ = ["Answer", "Entry", "Gone", "Registry", "acknowledge"]


_OVER: concurrent.futures.Future = concurrent.futures.Future()  # stands for the future of whatever is answered
_OVER.set_result(None)


class Gone(SpindleError):
    """The answer was kept for a while and is not any more: the client must send its request again."""

    http_status = 410


@dataclass(frozen=True, slots=True)
class Answer:
    """``proto`` or ``json`` holds the bytes served to every poll; ``failed`` ones are JSON with error and category."""

    json: bytes | None = None
    proto: bytes | None = None
    failed: bool = False

    @property
    def nbytes(self) -> int:
        return len(self.proto if self.proto is not None else self.json or b"")


@dataclass(slots=True, eq=False)
class Entry:
    """One submitted request."""

    request_id: str
    owner: str
    scope: str  # the model or sampling session it belongs to
    digest: bytes | None  # of the body, to tell a repeat from another request with the same id
    ack: bytes
    future: concurrent.futures.Future
    kind: str = ""
    answer: Answer | None = None
    waiters: list[asyncio.Future] = field(default_factory=list)
    on_settled: Callable[[Entry], None] | None = None


def acknowledge(entry: Entry) -> Response:
    """What a submit is answered with, at once."""
    return Response(entry.ack, media_type="application/json")


class Registry:
    """All futures of a server. Answered ones are dropped oldest first, those already fetched before the others."""

    def __init__(self, settings: ServerSettings, loop: asyncio.AbstractEventLoop) -> None:
        self.settings = settings
        self.loop = loop
        self._entries: dict[str, Entry] = {}
        self._unread: OrderedDict[str, Entry] = OrderedDict()
        self._read: OrderedDict[str, Entry] = OrderedDict()
        self._gone: OrderedDict[str, None] = OrderedDict()
        self.kept_bytes = 0

    @property
    def pending(self) -> int:
        return len(self._entries) - len(self._unread) - len(self._read)

    def check_room(self) -> None:
        """Raises Overloaded when no more may wait: to be asked before a request takes a place that a repeat of it would need."""
        if self.pending >= self.settings.max_pending_futures:
            raise Overloaded(f"{self.pending} requests wait for their answers, as many as this server allows; try again later")

    def repeat(self, request_id: str, owner: str, digest: bytes | None) -> Entry | None:
        """The entry of an earlier request with this id and the same content. Raises Conflict for other content."""
        entry = self._entries.get(request_id)
        if entry is None or entry.owner != owner:
            return None
        if entry.digest != digest:
            raise Conflict(f"request {request_id} came before with different content; a repeat must have the same content")
        return entry

    def same(self, request_id: str, future: concurrent.futures.Future) -> Entry | None:
        """The entry already made for this very future: the engine answers a repeat with the first one's."""
        entry = self._entries.get(request_id)
        return entry if entry is not None and entry.future is future else None

    def add(
        self,
        request_id: str,
        owner: str,
        scope: str,
        future: concurrent.futures.Future,
        answer: Callable[[Any], Answer],
        digest: bytes | None = None,
        kind: str = "",
        on_settled: Callable[[Entry], None] | None = None,
        thread: concurrent.futures.Executor | None = None,
        **ack: Any,
    ) -> Entry:
        """Register a future. ``answer`` makes the bytes from its result, in ``thread`` or else in the one that completes it."""
        try:
            self.check_room()
        except Overloaded:
            future.cancel()
            raise
        acknowledgement = encode_json({"request_id": request_id, **ack})
        entry = Entry(request_id, owner, scope, digest, acknowledgement, future, kind, on_settled=on_settled)
        self._forget(self._entries.get(request_id))
        self._gone.pop(request_id, None)
        self._entries[request_id] = entry

        def finished(done: concurrent.futures.Future) -> None:
            try:
                if thread is not None:
                    thread.submit(self._finished, entry, done, answer)
                    return
            except RuntimeError:  # it has shut down
                pass
            self._finished(entry, done, answer)

        future.add_done_callback(finished)
        return entry

    def _finished(self, entry: Entry, future: concurrent.futures.Future, answer: Callable[[Any], Answer]) -> None:
        failure: BaseException | None
        if future.cancelled():
            failure = Cancelled("the request was cancelled before it ran")
        elif (
            failure := future.exception()
        ) is None:  # never raised here: its traceback would keep the request's body as long as the answer
            try:
                settled = answer(future.result())
            except BaseException as error:
                failure = without_frames(error)
        if failure is not None:
            if not isinstance(failure, SpindleError):
                log.error("request %s failed", entry.request_id, exc_info=failure)
            settled = _failure(failure)
        try:
            self.loop.call_soon_threadsafe(self._settle, entry, settled)
        except RuntimeError:  # the server is stopping and its loop is closed: nobody polls any more
            pass

    def _settle(self, entry: Entry, answer: Answer) -> None:
        entry.answer = answer
        for waiter in entry.waiters:
            if not waiter.done():
                waiter.set_result(None)
        entry.waiters.clear()
        if (
            entry.kind != "forward_backward"
        ):  # whose repeats are known by their future; any other one would keep its result alive, uncounted
            entry.future = _OVER
        if self._entries.get(entry.request_id) is entry:
            self._unread[entry.request_id] = entry
            self.kept_bytes += answer.nbytes
            self._evict()
        if entry.on_settled is not None:
            entry.on_settled(entry)

    def _evict(self) -> None:
        while self.kept_bytes > self.settings.max_kept_bytes or len(self._unread) + len(self._read) > self.settings.max_kept_futures:
            pile = self._read or self._unread
            if len(self._read) + len(self._unread) <= 1:
                return
            self._forget(next(iter(pile.values())))

    def _forget(self, entry: Entry | None) -> None:
        if entry is None:
            return
        del self._entries[entry.request_id]
        if self._unread.pop(entry.request_id, None) or self._read.pop(entry.request_id, None):
            assert entry.answer is not None
            self.kept_bytes -= entry.answer.nbytes
        self._gone[entry.request_id] = None
        while len(self._gone) > self.settings.max_kept_futures:
            self._gone.popitem(last=False)

    def get(self, request_id: str, owner: str) -> Entry:
        """Raises NotFound for an id never seen (or another owner's), Gone for one no longer kept."""
        entry = self._entries.get(request_id)
        if entry is not None and entry.owner == owner:
            return entry
        if entry is None and request_id in self._gone:
            raise Gone(f"the answer of {request_id[:200]} is no longer kept; send the request again")
        raise NotFound(f"no request {request_id[:200]!r}: request_id must be one that a submit answered with")

    async def wait(self, entry: Entry, timeout_s: float) -> Answer | None:
        """The answer, as soon as it is there, or None after ``timeout_s``."""
        if entry.answer is None:
            waiter = self.loop.create_future()
            entry.waiters.append(waiter)
            try:
                async with asyncio.timeout(timeout_s):
                    await waiter
            except TimeoutError:
                if waiter in entry.waiters:  # else an answer came in the same turn of the loop
                    entry.waiters.remove(waiter)
        return entry.answer

    def release_polls(self) -> None:
        """Let every parked poll answer that its request is still pending: the server is about to stop."""
        for entry in self._entries.values():
            for waiter in entry.waiters:
                if not waiter.done():
                    waiter.set_result(None)
            entry.waiters.clear()

    def mark_read(self, entry: Entry) -> None:
        if self._unread.pop(entry.request_id, None) is not None:
            self._read[entry.request_id] = entry

    def drop(self, request_id: str, owner: str) -> None:
        """The client has it and will not ask again."""
        entry = self._entries.get(request_id)
        if entry is not None and entry.owner == owner and entry.answer is not None:
            self._forget(entry)

    def cancel(self, entry: Entry) -> None:
        entry.future.cancel()

    def cancel_scope(self, scope: str) -> None:
        for entry in [entry for entry in self._entries.values() if entry.scope == scope and entry.answer is None]:
            entry.future.cancel()


def _failure(error: BaseException) -> Answer:
    return Answer(json=encode_json(describe(error)), failed=True)
