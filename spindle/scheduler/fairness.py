"""Fairness: deficit round robin by tokens over the clients that have work a device may run.

The surplus form: a client is served while its account is positive and may overdraw it by one block; every turn adds its quantum. So the
size of the next block need not be known to decide whose turn it is, and the cost of a decision depends on neither the number of
clients nor the depth of their queues.

Accounts say whose turn it is, not who has had less: one that waits for room keeps its credit. For that each client also counts what it
was ever handed, by weight; who comes back from idleness starts level with whoever is being served.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection

from spindle.scheduler.items import Block
from spindle.scheduler.queues import AdapterQueue

LOOK_AHEAD = 16  # clients whose next block does not fit that are passed over before a micro-batch is closed


class Client:
    """Whoever shares one account: a session or an API key."""

    def __init__(self, name: str, weight: float, devices: int) -> None:
        self.name = name
        self.weight = weight
        self.account = 0.0  # tokens
        self.used = 0.0  # tokens handed out / weight, level with the others at the start of a busy time
        self.nbytes = 0  # request bytes waiting or running
        self.requests = 0
        self.adapters = 0
        self.waits = 0  # training requests begun
        self.waited_s = 0.0  # from queued to begun, over those
        self.work: list[deque[AdapterQueue]] = [deque() for _ in range(devices)]
        self.in_ring = 0  # bit d: stands in ring d


class Rings:
    """One ring of clients per device. All calls happen under the scheduler's lock."""

    def __init__(self, devices: int, quantum_tokens: int) -> None:
        self.quantum_tokens = quantum_tokens
        self.rings: list[deque[Client]] = [deque() for _ in range(devices)]
        self._level = 0.0  # what the client handed a block last had used until then

    def list_work(self, client: Client, queue: AdapterQueue, devices: range | tuple[int, ...]) -> None:
        """Note that ``queue`` has a block that any of ``devices`` may run."""
        for device in devices:
            bit = 1 << device
            if not queue.listed & bit:
                queue.listed |= bit
                client.work[device].append(queue)
            if not client.in_ring & bit:
                if not client.in_ring:
                    client.used = max(client.used, self._level)
                client.in_ring |= bit
                self.rings[device].append(client)

    def take(
        self,
        device: int,
        budget_tokens: int,
        may_run: Callable[[AdapterQueue, int], bool],
        hand_out: Callable[[AdapterQueue], Block | None],
        overtaking: Collection[Client] = (),
    ) -> list[Block]:
        """Blocks of one micro-batch for ``device``: at most ``budget_tokens`` together, or one longer block alone.

        overtaking: clients whose micro-batch lies ready already; only who has used less than any of them may go before it.
        """
        ring, bit = self.rings[device], 1 << device
        taken: list[Block] = []
        passed: list[Client] = []
        room = budget_tokens
        bar = min((client.used for client in overtaking), default=math.inf)
        while ring and room > 0 and len(passed) < LOOK_AHEAD:
            client = ring[0]
            if client in overtaking or client.used >= bar:
                passed.append(ring.popleft())
                continue
            if client.account <= 0:
                client.account += self.quantum_tokens * client.weight
                if client.account <= 0:
                    ring.rotate(-1)
                    continue
            fits = True
            work = client.work[device]
            while work and client.account > 0 and room > 0:
                queue = work[0]
                if not may_run(queue, device):
                    work.popleft()
                    queue.listed &= ~bit
                    continue
                tokens = queue.ready[0].block_tokens[queue.ready[0].next_block]
                if tokens > room and taken:
                    fits = False
                    break
                block = hand_out(queue)
                if block is None:  # cancelled at this very moment
                    continue
                taken.append(block)
                room -= tokens
                client.account -= tokens
                self._level = max(self._level, client.used)
                client.used += tokens / client.weight
                work.rotate(-1)  # the client's own adapters take turns
            if not work:
                ring.popleft()
                client.in_ring &= ~bit
                client.account = min(client.account, 0.0)  # credit is not saved up while idle; debt is paid
            elif not fits:
                passed.append(ring.popleft())
            else:
                ring.rotate(-1)
        ring.extendleft(reversed(passed))
        return taken
