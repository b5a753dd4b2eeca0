"""The scheduler: order, fairness, bounds. It knows lengths and bytes, and no torch.

Device threads pull work with ``next_work``; whoever completes work calls ``completed`` and
``block_done``, or ``operation_done``. One lock guards it all.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from spindle.errors import EngineClosed, InvalidRequest, NotFound, Overloaded, SpindleError
from spindle.future import Future
from spindle.scheduler.fairness import Client, Rings
from spindle.scheduler.items import Block, Item, Kind
from spindle.scheduler.queues import AdapterQueue

LET_BEGIN_S = 0.001  # waking a thread and filling a small micro-batch take a quarter of it


@dataclass(frozen=True)
class SchedulerConfig:
    """Bounds and weights. Tokens count model-input tokens; bytes count request bodies as held in memory."""

    token_budget: int = 4096  # per micro-batch
    quantum_tokens: int | None = None  # fairness grain; None = a quarter of the budget
    max_queue_bytes: int = 8 << 30
    max_client_queue_bytes: int = 2 << 30
    max_held_requests: int = 1024  # behind a gap, per adapter
    gap_timeout_s: float = 120.0
    client_weights: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("token_budget", "max_queue_bytes", "max_client_queue_bytes", "max_held_requests", "gap_timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for client, weight in self.client_weights.items():
            if not weight > 0:
                raise ValueError(f"client_weights[{client!r}] must be positive, got {weight}")


@dataclass(slots=True)
class Work:
    """What one device does next: the blocks of one micro-batch, or operations that are ready together. Exactly one is non-empty."""

    blocks: list[Block] = field(default_factory=list)
    operations: list[Item] = field(default_factory=list)


class Scheduler:
    """Thread-safe. ``devices`` is how many device threads pull work. ``per_group``: so many adjacent ones serve one group of devices, and
    what is at home with one of them may run on each."""

    def __init__(self, config: SchedulerConfig, devices: int = 1, per_group: int = 1) -> None:
        self.config = config
        self.devices = devices
        self.per_group = per_group
        self._lock = threading.Lock()
        self._work_ready = [threading.Condition(self._lock) for _ in range(devices)]
        self._ahead_ready = [threading.Condition(self._lock) for _ in range(devices)]
        self._idle = [False] * devices  # its own thread waits for work and has not been told of any
        self._starting = [False] * devices  # it has been told, and has not begun yet
        self._begun = threading.Condition(self._lock)
        self._preparing = [False] * devices  # the thread that works ahead has taken work and not yet handed it over
        self._io_ready = threading.Condition(self._lock)
        self._all_devices = range(devices)
        self._rings = Rings(devices, config.quantum_tokens or max(1, config.token_budget // 4))
        self._queues: dict[str, AdapterQueue] = {}
        self._leaving: list[AdapterQueue] = []  # of removed adapters, while something of theirs runs
        self._clients: dict[str, Client] = {}
        self._operations: list[deque[Item]] = [deque() for _ in range(devices)]
        self._io: deque[Item] = deque()
        self._gaps: deque[tuple[float, AdapterQueue]] = deque()  # in deadline order: the timeout is one constant
        self._woken = [False] * devices
        self._nbytes = 0
        self._requests = 0
        self._closed = False

    # --- adapters -------------------------------------------------------------------------------------------------

    def add_adapter(self, model_id: str, client: str, home: int) -> None:
        with self._lock:
            if model_id in self._queues:
                raise ValueError(f"model_id {model_id!r} is already in use")
            self._queues[model_id] = AdapterQueue(model_id, client, home, self.config.max_held_requests, self.config.gap_timeout_s)
            if client not in self._clients:
                self._clients[client] = Client(client, self.config.client_weights.get(client, 1.0), self.devices)
            self._clients[client].adapters += 1

    def remove_adapter(self, model_id: str, error: SpindleError) -> None:
        """Fail everything that waits for this adapter; what runs now finishes."""
        with self._lock:
            queue = self._queues.pop(model_id, None)
            if queue is None:
                raise NotFound(f"no adapter {model_id!r}; create it first")
            queue.closed = True
            self._leaving = [one for one in (*self._leaving, queue) if one.running_blocks or one.operation is not None]
            doomed = [*queue.ready, *queue.held.values()]
            queue.forget_all()
            client = self._clients[queue.client]
            client.adapters -= 1
            for item in doomed:
                item.failed = True
                self._release(item)
            if not client.adapters:
                del self._clients[queue.client]
        for item in doomed:
            item.future.fail(error)

    # --- in -------------------------------------------------------------------------------------------------------

    def put(self, item: Item) -> Future:
        """Queue an item. Returns its future, or the first one's when (adapter, seq_id) came before with the same content.

        Raises NotFound (no such adapter), Conflict (same seq_id, other content), Overloaded (a bound is reached), EngineClosed.
        """
        with self._lock:
            if self._closed:
                raise EngineClosed("the engine is closed")
            queue = self._queues.get(item.model_id)
            if queue is None:
                raise NotFound(f"no adapter {item.model_id!r}; create it first")
            if item.seq_id < 1:
                item.seq_id = queue.next_seq + len(queue.held)
            first = queue.repeat_of(item)
            if first is not None:
                return first
            client = self._clients[queue.client]
            self._check_room(item, client)
            had_gap = queue.gap_deadline
            queue.put(item)
            item.queue, item.account = queue, client
            client.nbytes += item.nbytes
            client.requests += 1
            self._nbytes += item.nbytes
            self._requests += 1
            if item.kind is Kind.SKIP:
                self._release(item)
                queue.forget_answered()
            if queue.gap_deadline is not None and queue.gap_deadline != had_gap:
                self._gaps.append((queue.gap_deadline, queue))
                self._tell(0)  # device 0 keeps the clock of the gaps
            self._advance(queue)
        item.future.add_done_callback(lambda future: self._cancelled(item) if future.cancelled() else None)
        return item.future

    def _cancelled(self, item: Item) -> None:
        with self._lock:
            item.failed = True
            item.drop_payload()
            self._release(item)
            if item.queue.operation is item:
                item.queue.operation = None
            item.queue.forget_answered()
            self._advance(item.queue)

    def check_room(self, nbytes: int) -> None:
        """Raise Overloaded now if a body of ``nbytes`` could not be queued for anybody, before anything is decoded for it."""
        with self._lock:
            self._check_bytes(self._nbytes, nbytes, self.config.max_queue_bytes, "in all")

    def _check_room(self, item: Item, client: Client) -> None:
        self._check_bytes(client.nbytes, item.nbytes, self.config.max_client_queue_bytes, "of this client")
        self._check_bytes(self._nbytes, item.nbytes, self.config.max_queue_bytes, "in all")

    @staticmethod
    def _check_bytes(held: int, nbytes: int, bound: int, whose: str) -> None:
        if nbytes and held and held + nbytes > bound:
            raise Overloaded(
                f"{held} bytes of requests {whose} are queued and this one has {nbytes}; at most {bound} may be; try again later"
            )

    # --- out ------------------------------------------------------------------------------------------------------

    def next_work(self, device: int, timeout_s: float | None = None, ahead: bool = False) -> Work | None:
        """What ``device`` does next; waits for work. None when the timeout passed or the scheduler is closed and drained; empty
        work when ``wake`` was called.

        ahead: for a second thread that prepares work while the device's own is busy; it hears of new work only then. Until it says
        ``prepared`` the device's own gets nothing, since what is being prepared comes first.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with self._lock:
                now = time.monotonic()
                doomed = self._expire_gaps(now)
                if not doomed:
                    work = None if self._preparing[device] else self._take(device)
                    if work is not None:
                        self._preparing[device] = ahead
                        if not ahead and self._rings.rings[device]:
                            self._ahead_ready[device].notify()
                        return work
                    if self._woken[device] and not ahead:
                        self._woken[device] = False
                        return Work()
                    if self._closed or (deadline is not None and now >= deadline):
                        return None
                    waits = [t for t in (deadline, self._gaps[0][0] if self._gaps and device == 0 else None) if t is not None]
                    longest = max(0.0, min(waits) - now) if waits else None
                    if ahead:
                        self._ahead_ready[device].wait(longest)
                    else:
                        self._idle[device] = True
                        self._has_begun(device)  # told in vain: there is nothing for it
                        self._work_ready[device].wait(longest)
                        self._idle[device] = False
            for item, error in doomed:
                item.future.fail(error)

    def overtaking_work(self, device: int, ready: Iterable[Item]) -> Work | None:
        """What ``device`` should do before a micro-batch that lies ready: operations, and blocks of clients that have used less than
        those of the ``ready`` items. Does not wait."""
        with self._lock:
            return self._take(device, {item.account for item in ready if item.account is not None})

    def wake(self, device: int) -> None:
        """Make ``next_work`` of that device return even without work."""
        with self._lock:
            self._woken[device] = True
            self._work_ready[device].notify()

    def prepared(self, device: int) -> None:
        """What ``next_work(ahead=True)`` gave lies ready for the device's own thread."""
        with self._lock:
            self._preparing[device] = False
        self.wake(device)

    def begun(self, device: int) -> None:
        """The device's thread starts to compute what ``next_work`` gave."""
        with self._lock:
            self._has_begun(device)

    def let_begin(self, timeout_s: float = LET_BEGIN_S) -> None:
        """For a thread that has much more to do after a ``put`` and holds the interpreter meanwhile, which an idle device that the ``put``
        woke needs first: wait until such devices have begun to compute, at most ``timeout_s``."""
        with self._lock:
            if True in self._starting:
                self._begun.wait_for(lambda: True not in self._starting, timeout_s)

    def _has_begun(self, device: int) -> None:
        if self._starting[device]:
            self._starting[device] = False
            self._begun.notify_all()

    def _tell(self, device: int) -> None:
        """There is work: for the device's thread if it waits, else for the one that works ahead."""
        if self._idle[device]:
            self._idle[device] = False
            self._starting[device] = True
            self._work_ready[device].notify()
        else:
            self._ahead_ready[device].notify()

    @property
    def closed(self) -> bool:
        return self._closed

    def next_io(self) -> Item | None:
        """The next save or load; waits. None when closed and drained."""
        with self._lock:
            while True:
                while self._io:
                    if self._start(item := self._io.popleft()):
                        return item
                if self._closed:
                    return None
                self._io_ready.wait()

    def _take(self, device: int, overtaking: Collection[Client] = ()) -> Work | None:
        operations = self._operations[device]
        if operations:
            ready = [item for item in operations if self._start(item)]
            operations.clear()
            if ready:
                return Work(operations=ready)
        blocks = self._rings.take(device, self.config.token_budget, self._may_run, self._hand_out, overtaking)
        return Work(blocks=blocks) if blocks else None

    def _start(self, operation: Item) -> bool:
        """False when the operation was cancelled since it became ready (``_cancelled`` then moves its queue on)."""
        operation.started = operation.future.set_running_or_notify_cancel()
        return operation.started

    def _may_run(self, queue: AdapterQueue, device: int) -> bool:
        return queue.block_available() and (device in self._at_home(queue) or len(queue.ready[0].blocks) > 1)

    def _at_home(self, queue: AdapterQueue) -> range:
        first = queue.home // self.per_group * self.per_group
        return range(first, first + self.per_group)

    def _hand_out(self, queue: AdapterQueue) -> Block | None:
        item = queue.ready[0]
        if not item.started:
            if not item.future.set_running_or_notify_cancel():
                item.failed = True  # its callback waits for this lock
                return None
            item.started = True
            queue.started.append(item)
            item.account.waited_s += time.monotonic() - item.queued_at
            item.account.waits += 1
        block = Block(item, item.next_block)
        item.next_block += 1
        item.blocks_running += 1
        queue.running_blocks += 1
        if item.next_block == len(item.blocks):
            queue.ready.popleft()
            self._advance(queue)
        return block

    # --- completion -----------------------------------------------------------------------------------------------

    def completed(self, block: Block) -> list[Item]:
        """A block is computed (or failed). Returns the items of its adapter that are now whole, in seq_id order, to be committed in it.

        Call it and commit under one lock per adapter, then call ``block_done``.
        """
        with self._lock:
            block.item.blocks_left -= 1
            block.item.blocks_running -= 1
            queue = block.item.queue
            whole: list[Item] = []
            while queue.started:
                first = queue.started[0]
                if first.failed:
                    if first.blocks_running:
                        break
                elif first.blocks_left:
                    break
                else:
                    whole.append(first)
                queue.started.popleft()
            return whole

    def block_done(self, block: Block) -> None:
        """Nothing more will touch the adapter for this block: what waits behind it may run."""
        with self._lock:
            item = block.item
            if item.blocks_left == 0:
                self._release(item)
            queue = item.queue
            queue.running_blocks -= 1
            queue.forget_answered()
            self._advance(queue)

    def operation_done(self, item: Item) -> None:
        """An operation is over: its adapter is free again."""
        with self._lock:
            self._release(item)
            queue = item.queue
            if queue.operation is item:
                queue.operation = None
            queue.forget_answered()
            self._advance(queue)

    def fail(self, item: Item, error: BaseException) -> None:
        """Fail a train item: blocks not yet handed out never run; each one handed out still needs ``completed`` and ``block_done``."""
        with self._lock:
            if item.failed:
                return
            item.failed = True
            self._release(item)
            queue = item.queue
            self._advance(queue)
        item.future.fail(error)

    def release_adapter(self, item: Item) -> None:
        """An operation no longer needs its adapter although its future is not settled yet (a save that has its copy)."""
        with self._lock:
            queue = item.queue
            if queue.operation is item:
                queue.operation = None
                self._advance(queue)

    # --- inside (lock held) ---------------------------------------------------------------------------------------

    def _release(self, item: Item) -> None:
        client, item.account = item.account, None
        if client is None:
            return
        client.nbytes -= item.nbytes
        client.requests -= 1
        self._nbytes -= item.nbytes
        self._requests -= 1

    def _advance(self, queue: AdapterQueue) -> None:
        if queue.closed:
            return
        if queue.operation_available():
            item = queue.ready.popleft()
            queue.operation = item
            if item.kind is Kind.IO:
                self._io.append(item)
                self._io_ready.notify()
            else:
                self._operations[queue.home].append(item)
                self._tell(queue.home)
        elif queue.block_available():
            devices = self._all_devices if len(queue.ready[0].blocks) > 1 else self._at_home(queue)
            self._rings.list_work(self._clients[queue.client], queue, devices)
            for device in devices:
                self._tell(device)

    def _expire_gaps(self, now: float) -> list[tuple[Item, InvalidRequest]]:
        """Give up gaps whose time is over. The errors are for the caller to hand out, once the lock is free: callbacks may come back."""
        doomed: list[tuple[Item, InvalidRequest]] = []
        while self._gaps and self._gaps[0][0] <= now:
            deadline, queue = self._gaps.popleft()
            if queue.gap_deadline == deadline and not queue.closed:
                for item, error in queue.give_up_gap():
                    item.failed = True
                    self._release(item)
                    doomed.append((item, error))
                self._advance(queue)
        return doomed

    # --- end ------------------------------------------------------------------------------------------------------

    def close(self, stopped: SpindleError | None = None) -> None:
        """Fail everything that has not started and wake every waiter; started work may finish. stopped: why it will not, on devices."""
        with self._lock:
            self._closed = True
            waiting = (*self._io, *(item for operations in self._operations for item in operations))
            doomed = [item for queue in self._queues.values() for item in (*queue.ready, *queue.held.values()) if not item.started]
            doomed.extend(waiting)
            queues = () if stopped is None else (*self._queues.values(), *self._leaving)
            started = [item for queue in queues for item in (*queue.started, queue.operation) if item is not None]
            lost = [item for item in started if item.kind is not Kind.IO]
            self._io.clear()
            for operations in self._operations:
                operations.clear()
            for item in (*doomed, *lost):
                item.failed = True
                self._release(item)
            for condition in (*self._work_ready, *self._ahead_ready, self._io_ready):
                condition.notify_all()
        for item in doomed:
            item.future.fail(EngineClosed("the engine was closed before this request ran"))
        if stopped is not None:
            for item in lost:
                item.future.fail(stopped)

    def stats(self) -> dict[str, Any]:
        """Queue depths and bytes, by client."""
        now = time.monotonic()
        with self._lock:
            return {
                "queued_requests": self._requests,
                "queued_bytes": self._nbytes,
                "adapters": len(self._queues),
                "clients": {
                    client.name: {
                        "requests": client.requests,
                        "bytes": client.nbytes,
                        "adapters": client.adapters,
                        "waits": client.waits,
                        "waited_s": client.waited_s,
                    }
                    for client in self._clients.values()
                },
                "oldest_wait_s": max((now - q.ready[0].queued_at for q in self._queues.values() if q.ready), default=0.0),
            }
