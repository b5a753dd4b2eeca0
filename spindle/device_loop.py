"""One device: a feeder thread that lays out the next micro-batch while the compute thread runs this one, and the sampler between them."""

from __future__ import annotations

import logging
import queue
import threading
import time
from typing import Any

import torch

from spindle.compute.batch import MicroBatch
from spindle.executor import Executor, as_server_error
from spindle.scheduler import Scheduler

logger = logging.getLogger("spindle")

_WAKE = object()
_STOP = object()


class DeviceLoop:
    """Owns the two threads of device ``index``. ``sampling_share`` is the part of the time that sampling may take while training waits."""

    def __init__(self, index: int, executor: Executor, scheduler: Scheduler, sampler: Any, threads: int, sampling_share: float) -> None:
        self.index = index
        self.executor = executor
        self.scheduler = scheduler
        self.sampler = sampler
        self.sampling_share = sampling_share
        self.busy_s = 0.0
        self.sampling_s = 0.0
        self._threads_per_device = threads
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._room = threading.Semaphore(1)  # one micro-batch may lie ready beside the one that runs
        self._feeder = threading.Thread(target=self._feed, name=f"spindle-feed-{index}", daemon=True)
        self._compute = threading.Thread(target=self._run, name=f"spindle-device-{index}", daemon=True)

    def start(self) -> None:
        self._feeder.start()
        self._compute.start()

    def wake(self) -> None:
        """The sampler has new work."""
        self._jobs.put(_WAKE)

    def join(self, timeout_s: float) -> bool:
        """Wait for both threads after the scheduler is closed. False when they did not end in time."""
        deadline = time.monotonic() + timeout_s
        self._feeder.join(max(0.0, deadline - time.monotonic()))
        self._compute.join(max(0.0, deadline - time.monotonic()))
        return not (self._feeder.is_alive() or self._compute.is_alive())

    def _feed(self) -> None:
        while True:
            self._room.acquire()
            work = self.scheduler.next_work(self.index)
            if work is None:
                self._jobs.put(_STOP)
                return
            if work.operations:
                self._jobs.put(work.operations)
                continue
            try:
                self._jobs.put(self.executor.fill(work.blocks))
            except BaseException as error:
                logger.exception("filling a micro-batch failed")
                for block in work.blocks:
                    self.executor.finish(block, None, as_server_error(error, block.item))
                self._room.release()

    def _run(self) -> None:
        if self._threads_per_device:
            torch.set_num_threads(self._threads_per_device)
        sampler = self.sampler
        while True:
            sampling = sampler.has_work()
            try:
                job = self._jobs.get(block=not sampling)
            except queue.Empty:
                job = None
            if job is _STOP:
                sampler.close()
                return
            started = time.perf_counter()
            if job is not None and job is not _WAKE:
                self._room.release()
                if isinstance(job, MicroBatch):
                    self.executor.run(job)
                else:
                    self.executor.operate(job)
            ran = time.perf_counter() - started
            self.busy_s += ran
            if sampler.has_work():
                self._sample(ran)

    def _sample(self, trained_s: float) -> None:
        """At least one sampling step, then more until sampling had its share beside the micro-batch that just ran."""
        budget_s = trained_s * self.sampling_share / max(1e-6, 1.0 - self.sampling_share)
        started = time.perf_counter()
        while True:
            self.sampler.step()
            spent = time.perf_counter() - started
            if spent >= budget_s or not self.sampler.has_work():
                break
        self.busy_s += spent
        self.sampling_s += spent
