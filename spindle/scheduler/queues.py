"""Order: one queue per adapter, in seq_id order, with gaps held and repeats answered by the first one's future."""

from __future__ import annotations

import time
from collections import OrderedDict, deque

from spindle.errors import Conflict, InvalidRequest, Overloaded
from spindle.future import Future
from spindle.scheduler.items import Item, Kind

REPLAYS_KEPT = 16  # answered requests per adapter whose repeats still get the first one's answer


class AdapterQueue:
    """The requests of one adapter. ``ready`` holds those whose turn has come; ``held`` those behind a gap."""

    def __init__(self, model_id: str, client: str, home: int, max_held: int, gap_timeout_s: float) -> None:
        self.model_id = model_id
        self.client = client
        self.home = home  # device index
        self.max_held = max_held
        self.gap_timeout_s = gap_timeout_s
        self.next_seq = 1  # first seq_id not yet in `ready`
        self.held: dict[int, Item] = {}
        self.ready: deque[Item] = deque()
        self.running_blocks = 0
        self.started: deque[Item] = deque()  # train items handed out and not yet committed, in order
        self.operation: Item | None = None  # dispatched, not yet completed: nothing else of this adapter may run
        self.listed = 0  # bit d: this queue stands in the client's list for device d
        self.gap_deadline: float | None = None
        self.given_up: deque[int] = deque(maxlen=4096)  # seq_ids that came too late, for their error text
        self.closed = False
        self._first: OrderedDict[int, Item] = OrderedDict()  # seq_id -> first item with it
        self._heavy: deque[Item] = deque()  # the heavy ones of those

    def repeat_of(self, item: Item) -> Future | None:
        """The future of the first request with this seq_id, or None when this is the first. Raises Conflict for other content."""
        first = self._first.get(item.seq_id)
        if first is not None:
            if first.fingerprint != item.fingerprint or first.kind is not item.kind:
                raise Conflict(
                    f"seq_id {item.seq_id} of {self.model_id} was already used by a different request; a repeat must have the same content"
                )
            return first.future
        if item.seq_id in self.given_up:
            raise Conflict(f"seq_id {item.seq_id} of {self.model_id} came after the requests behind it had given up waiting for it")
        if item.seq_id < self.next_seq:
            raise Conflict(
                f"seq_id {item.seq_id} of {self.model_id} was answered before and its answer is no longer kept "
                f"(the last {REPLAYS_KEPT} are); the next new one is {self.next_seq}"
            )
        return None

    def put(self, item: Item) -> None:
        """Take a first-seen item in; move every item whose turn has come to ``ready``."""
        if item.seq_id > self.next_seq and len(self.held) >= self.max_held:
            raise Overloaded(f"{len(self.held)} requests of {self.model_id} wait for seq_id {self.next_seq}; at most {self.max_held} may")
        self._first[item.seq_id] = item
        if item.heavy:
            self._heavy.append(item)
        if item.seq_id == self.next_seq:
            self._append(item)
            while (following := self.held.pop(self.next_seq, None)) is not None:
                self._append(following)
            self.gap_deadline = None
        else:
            self.held[item.seq_id] = item
        if self.held and self.gap_deadline is None:
            self.gap_deadline = time.monotonic() + self.gap_timeout_s

    def _append(self, item: Item) -> None:
        self.next_seq = item.seq_id + 1
        if item.kind is not Kind.SKIP:
            self.ready.append(item)

    def give_up_gap(self) -> list[tuple[Item, InvalidRequest]]:
        """Give up everything behind the gap: returns the items, in order, with their errors, and moves the order past them."""
        items = [self.held[seq] for seq in sorted(self.held)]
        last = items[-1].seq_id
        self.given_up.extend(seq for seq in range(self.next_seq, min(last, self.next_seq + 4 * self.max_held)) if seq not in self.held)
        missing, self.next_seq = self.next_seq, last + 1
        self.held.clear()
        self.gap_deadline = None
        return [
            (
                item,
                InvalidRequest(
                    f"seq_id {item.seq_id} of {self.model_id} waited {self.gap_timeout_s:g} s for seq_id {missing}, which never came; "
                    f"send seq_ids without gaps from 1",
                    self.model_id,
                    item.seq_id,
                ),
            )
            for item in items
        ]

    def forget_answered(self) -> None:
        """Drop the oldest answered repeats beyond REPLAYS_KEPT, and heavy ones that a later heavy one followed."""
        while len(self._heavy) > 1 and self._heavy[0].future.done():
            self._first.pop(self._heavy.popleft().seq_id, None)
        while len(self._first) > REPLAYS_KEPT:
            seq, item = next(iter(self._first.items()))
            if not item.future.done():
                break
            del self._first[seq]

    def forget_all(self) -> None:
        """The adapter goes: let go of every item, since answered futures that somebody keeps lead here."""
        for items in (self.ready, self.held, self._first, self._heavy):
            items.clear()

    def head(self) -> Item | None:
        """The next item to hand out, dropping those cancelled or failed meanwhile."""
        while self.ready:
            item = self.ready[0]
            if not item.failed:
                return item
            self.ready.popleft()
        return None

    def block_available(self) -> bool:
        """Whether a block of the head item may be handed out now."""
        return self.operation is None and not self.closed and (item := self.head()) is not None and item.kind is Kind.TRAIN

    def operation_available(self) -> bool:
        """Whether the head is an operation and everything before it is complete."""
        if self.operation is not None or self.running_blocks or self.closed:
            return False
        return (item := self.head()) is not None and item.kind is not Kind.TRAIN
