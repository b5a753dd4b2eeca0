"""One device and its thread: micro-batches and operations as the scheduler hands them out, and the sampler between them."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

import torch

from spindle.compute.batch import MicroBatch, SegmentResult
from spindle.errors import ServerError
from spindle.executor import Executor
from spindle.sampling import Sampler
from spindle.scheduler import Item, Scheduler, Work
from spindle.threads import join_all

logger = logging.getLogger("spindle")

Job = MicroBatch | list[Item] | None  # a filled micro-batch, operations, or nothing to do but sampling

OVERTAKE = 4  # micro-batches of others that may run before one that lies ready


class DeviceLoop:
    """Owns thread ``index``: that of a device, or one of those that a group of devices has, as many as it has devices.

    sampler: None where another thread of the group samples. sampling_share: the part of the time that sampling may take while training
    waits. prefetch: a second thread fills the next micro-batch while this one is computed. What came meanwhile from a client that has
    used less may still overtake it, so that a small request waits for no more than the micro-batch that runs.
    cpu_threads: torch's threads on this device; 0 leaves them alone.
    """

    def __init__(
        self,
        index: int,
        executor: Executor,
        scheduler: Scheduler,
        sampler: Sampler | None,
        *,
        sampling_share: float,
        prefetch: bool,
        cpu_threads: int,
    ) -> None:
        self.index = index
        self.executor = executor
        self.scheduler = scheduler
        self.sampler = sampler
        self.sampling_share = sampling_share
        self.busy_s = 0.0
        self.sampling_s = 0.0
        self._cpu_threads = cpu_threads
        self._filled: deque[MicroBatch | list[Item]] = deque()  # what the second thread has prepared: at most one
        self._room: SimpleQueue[None] = SimpleQueue()  # one entry: one micro-batch may lie ready beside the one that runs
        self._room.put(None)
        self._overtaken = 0  # jobs that ran before the one that lies ready
        self._results: SimpleQueue[tuple[MicroBatch, list[SegmentResult]] | None] = SimpleQueue()  # to be handed out by the third thread
        self._settling = threading.Lock()  # held from when results are there until they are handed out
        self._feeder = self._thread("feed", self._feed) if prefetch else None
        self._threads = [self._thread("device", self._run), self._thread("settle", self._settle_results)]
        if self._feeder is not None:
            self._threads.append(self._feeder)

    def _thread(self, name: str, run: Callable[[], None]) -> threading.Thread:
        return threading.Thread(target=run, name=f"spindle-{name}-{self.index}", daemon=True)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def wake(self) -> None:
        """The sampler has new work."""
        self.scheduler.wake(self.index)

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads after the scheduler is closed. False when they did not end in time."""
        return join_all(self._threads, timeout_s)

    def _run(self) -> None:
        if self._cpu_threads:
            torch.set_num_threads(self._cpu_threads)
        try:
            while True:
                trained_s = self._work(wait=self.sampler is None or not self.sampler.has_work())
                if self.sampler is not None and self.sampler.has_work():
                    self._sample(self.sampler, trained_s)
        except StopIteration:
            pass
        except BaseException:
            self._stop()
            raise
        finally:
            self._results.put(None)
            if self.sampler is not None:
                self.sampler.close()

    def _work(self, wait: bool) -> float:
        """The next job and its results, of which an idle thread keeps nothing. Returns the seconds it took."""
        job = self._next(wait)
        self.scheduler.begun(self.index)
        started = time.perf_counter()
        if isinstance(job, MicroBatch):
            results = self.executor.run(job)
            if results is not None:
                self._settle(job, results)
        elif job:
            self.executor.operate(job)
        trained_s = time.perf_counter() - started
        self.busy_s += trained_s
        return trained_s

    def _settle(self, batch: MicroBatch, results: list[SegmentResult]) -> None:
        """Hand results out, one micro-batch after the other: beside the next one where it lies ready and no request ends with this one;
        else here and now, for an answer is waited for, and what it lets go on may come before what lies ready."""
        self._settling.acquire()
        ends = any(segment.tag.index == len(segment.tag.item.blocks) - 1 for segment in batch.segments)
        if self._filled and not ends:
            self._results.put((batch, results))
            return
        try:
            self.executor.settle(batch, results)
        finally:
            self._settling.release()

    def _settle_results(self) -> None:
        while (done := self._results.get()) is not None:
            try:
                self.executor.settle(*done)
            except BaseException:  # this thread goes on: the device's own may have more for it before it ends
                self._stop()
            finally:
                done = None
                self._settling.release()

    def _stop(self) -> None:
        """One of the threads came upon an error that nothing foresees: nobody may wait for what it held, and the other one must end."""
        logger.critical("device %d stopped on an unexpected error; the engine closes", self.index, exc_info=True)
        self.scheduler.close(ServerError("the engine stopped on an unexpected error while this request ran; its log says which"))
        self._room.put(None)

    def _next(self, wait: bool) -> Job:
        """What lies ready, or what comes: on an idle device this very thread fills it. Raises StopIteration at the end."""
        if self._filled:
            return self._ready_or_overtaking()
        work = self.scheduler.next_work(self.index, None if wait else 0.0)
        if work is not None:
            return self._job(work)
        # At the end the second thread may be about to hand over its last.
        if self.scheduler.closed and (self._feeder is None or join_all([self._feeder], 0.01)) and not self._filled:
            raise StopIteration
        return None

    def _job(self, work: Work) -> Job:
        return self.executor.fill(work.blocks) if work.blocks else work.operations

    def _ready_or_overtaking(self) -> Job:
        job = self._filled[0]
        if isinstance(job, MicroBatch) and self._overtaken < OVERTAKE:
            other = self.scheduler.overtaking_work(self.index, [segment.tag.item for segment in job.segments])
            if other is not None:
                self._overtaken += 1
                return self._job(other)
        self._overtaken = 0
        self._filled.popleft()
        self._room.put(None)
        return job

    def _feed(self) -> None:
        try:
            while self._prepare():
                pass
        except BaseException:
            self._stop()
            raise

    def _prepare(self) -> bool:
        """Fill the next micro-batch once there is room for it; False at the end."""
        self._room.get()
        work = self.scheduler.next_work(self.index, ahead=True)
        if work is None:
            return False
        job = self._job(work)
        if job:
            self._filled.append(job)
        else:
            self._room.put(None)
        self.scheduler.prepared(self.index)
        return True

    def _sample(self, sampler: Sampler, trained_s: float) -> None:
        """At least one sampling step, then more until sampling had its share beside the micro-batch that just ran."""
        budget_s = trained_s * self.sampling_share / (1.0 - self.sampling_share)
        started = time.perf_counter()
        while True:
            sampler.step()
            spent = time.perf_counter() - started
            if spent >= budget_s or not sampler.has_work():
                break
        self.busy_s += spent
        self.sampling_s += spent
