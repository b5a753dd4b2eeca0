"""What the sampler has to do: requests, the prompts to prefill for them, and the order in which those get their turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from spindle.sampling.kv import PromptKV
from spindle.sampling.prompt_scores import PromptScores
from spindle.sampling.request import Checked
from spindle.types import SampledSequence, SampleOutput


@dataclass(slots=True, eq=False)
class Live:
    """A request from submit to answer. number: its own among all requests of a sampler."""

    number: int
    checked: Checked
    future: Future
    results: list[SampledSequence | None]  # by sample number
    remaining: int
    scores: PromptScores | None = None  # made when the prompt's prefill begins
    hit_tokens: int = 0

    @property
    def snapshot(self) -> Any:
        return self.checked.request.snapshot

    def answer(self) -> None:
        scores = {} if self.scores is None else self.scores.fields()
        sequences = [sequence for sequence in self.results if sequence is not None]
        settle(self.future.set_result, SampleOutput(sequences, prompt_cache_hit_tokens=self.hit_tokens, **scores))

    def fail(self, error: Exception) -> None:
        settle(self.future.set_exception, error)


@dataclass(slots=True, eq=False)
class Job:
    """Tokens to prefill, then samples to start: fresh ones by number, or ``slots`` that were preempted."""

    live: Live
    tokens: np.ndarray  # [n] int64
    samples: np.ndarray
    slots: np.ndarray | None = None
    scored: bool = False  # what is asked of the prompt is answered on the way
    kv: PromptKV = field(default_factory=lambda: PromptKV(0))  # its place is made when it is admitted


@dataclass(slots=True)
class Batch:
    """One forward pass. groups: (first row, last + 1, weights). decode: slots of the single rows, at rows ``decode_rows``."""

    tokens: list[np.ndarray] = field(default_factory=list)
    positions: list[np.ndarray] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    groups: list[tuple[int, int, Any]] = field(default_factory=list)
    decode: list[np.ndarray] = field(default_factory=list)
    decode_rows: list[np.ndarray] = field(default_factory=list)
    jobs: list[tuple[Job, int, int]] = field(default_factory=list)  # job, its rows


class Waiting:
    """Jobs in a queue per session; the sessions take turns, so that a client with many requests holds up its own ones only."""

    def __init__(self) -> None:
        self._queues: dict[str | None, deque[Job]] = {}  # in the order of turns, none empty

    def __len__(self) -> int:
        return sum(map(len, list(self._queues.values())))

    def add(self, job: Job) -> None:
        self._queues.setdefault(job.live.checked.request.session, deque()).append(job)

    def take(self) -> Job:
        """The next job; its session's next one comes after the other sessions'."""
        session, queue = next(iter(self._queues.items()))
        job = queue.popleft()
        del self._queues[session]
        if queue:
            self._queues[session] = queue
        return job

    def put_back(self, jobs: list[Job]) -> None:
        """These are next again, in this order within a session, and the first one's session has the turn."""
        for job in reversed(jobs):
            session = job.live.checked.request.session
            queue = self._queues.pop(session, deque())
            queue.appendleft(job)
            self._queues = {session: queue} | self._queues

    def numbers(self) -> set[int]:
        """Of the requests that have jobs here."""
        return {job.live.number for queue in self._queues.values() for job in queue}

    def drop(self, numbers: set[int]) -> None:
        """Forget the jobs of those requests."""
        kept = ((s, deque(job for job in queue if job.live.number not in numbers)) for s, queue in self._queues.items())
        self._queues = {session: queue for session, queue in kept if queue}


def settle(setter: Callable[[Any], None], value: Any) -> None:
    try:
        setter(value)
    except InvalidStateError:  # cancelled meanwhile
        pass
