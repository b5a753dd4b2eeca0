"""What the scheduler costs: microseconds per request at 1,000 adapters, shallow and deep queues. No torch in the timed part."""

from __future__ import annotations

import time

import numpy as np
import pytest

from spindle.future import Future
from spindle.scheduler import Item, Kind, Scheduler, SchedulerConfig

ADAPTERS = 1000


def run_through(depth: int, rounds: int) -> float:
    """Put ``depth`` requests over 1,000 adapters, run them all, ``rounds`` times. Returns CPU microseconds of scheduling per request."""
    scheduler = Scheduler(SchedulerConfig(token_budget=4096))
    for number in range(ADAPTERS):
        scheduler.add_adapter(f"m{number}", f"c{number}", 0)
    rng = np.random.default_rng(0)
    seqs = [0] * ADAPTERS
    spent = 0.0
    done = 0
    for _ in range(rounds):
        items = []
        for number in range(depth):
            model = number % ADAPTERS
            seqs[model] += 1
            item = Item(f"m{model}", seqs[model], Kind.TRAIN, Future(), fingerprint=b"", nbytes=1000)
            items.append((item, rng.integers(1, 600, 2)))
        started = time.thread_time()
        for item, lengths in items:
            item.cut(lengths, 4096)
            scheduler.put(item)
        while (work := scheduler.next_work(0, 0)) is not None:
            for block in work.blocks:
                done += len(scheduler.completed(block))
                scheduler.block_done(block)
                block.item.future.settle(None)
        spent += time.thread_time() - started
    assert done == depth * rounds, "a request was lost"
    return spent / done * 1e6


@pytest.mark.benchmark(group="scheduler")
@pytest.mark.parametrize("depth", [1000, 10_000])
def test_cost_per_request(benchmark, figures, depth):
    cost = benchmark.pedantic(lambda: run_through(depth, 10_000 // depth), rounds=3, iterations=1, warmup_rounds=1)
    figures["schedule_us_at_depth_10000" if depth == 10_000 else "schedule_us_per_request"] = round(cost, 1)
