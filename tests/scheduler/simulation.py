"""A seeded simulation of many clients on one scheduler: no torch, no clock but a counter of tokens computed."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field

import numpy as np

from spindle.future import Future
from spindle.scheduler import Item, Kind, Scheduler, SchedulerConfig


@dataclass
class Outcome:
    ran: dict[str, list[int]] = field(default_factory=dict)  # model -> seq_ids in the order they ran
    waits: dict[str, list[int]] = field(default_factory=dict)  # client -> tokens computed between put and the last block
    fill: list[float] = field(default_factory=list)  # share of the budget used, per micro-batch
    requests: int = 0
    schedule_s: float = 0.0  # wall time inside the scheduler


def requests_of(rng: random.Random, model: str, count: int, longest: int, max_datums: int) -> list[Item]:
    """Forward_backwards with an optim_step after every few, shuffled within windows of four so that gaps appear and close."""
    items = []
    for seq in range(1, count + 1):
        if seq % 4 == 0:
            items.append(Item(model, seq, Kind.DEVICE, Future(), fingerprint=str(seq).encode()))
        else:
            item = Item(model, seq, Kind.TRAIN, Future(), fingerprint=str(seq).encode(), nbytes=100)
            item.cut(np.array([rng.randint(1, longest) for _ in range(rng.randint(1, max_datums))], dtype=np.int64), 4096)
            items.append(item)
    shuffled = []
    for at in range(0, len(items), 4):
        window = items[at : at + 4]
        rng.shuffle(window)
        shuffled += window
    return shuffled


def simulate(seed: int, clients: int, per_client: int, devices: int = 1, longest: int = 600, max_datums: int = 4) -> Outcome:
    """All clients' requests arrive interleaved at random; devices take turns; returns what ran when."""
    rng = random.Random(seed)
    outcome = Outcome()
    scheduler = Scheduler(SchedulerConfig(token_budget=4096), devices)
    arrivals: list[list[Item]] = []
    for number in range(clients):
        model = f"m{number}"
        scheduler.add_adapter(model, f"c{number}", number % devices)
        outcome.ran[model] = []
        outcome.waits[f"c{number}"] = []
        arrivals.append(requests_of(rng, model, per_client, longest, max_datums))
        outcome.requests += per_client
    order = [number for number in range(clients) for _ in range(per_client)]
    rng.shuffle(order)
    clock = 0
    put_at: dict[Item, int] = {}
    position = 0
    idle = 0
    while idle < devices:
        burst = rng.randint(0, 40)
        for number in order[position : position + burst]:
            item = arrivals[number].pop(0)
            put_at[item] = clock
            started = time.perf_counter()
            scheduler.put(item)
            outcome.schedule_s += time.perf_counter() - started
        position = min(position + burst, len(order))
        idle = 0
        for device in range(devices):
            started = time.perf_counter()
            work = scheduler.next_work(device, timeout_s=0)
            outcome.schedule_s += time.perf_counter() - started
            if work is None:
                idle += position == len(order)
                continue
            for item in work.operations:
                started = time.perf_counter()
                scheduler.operation_done(item)
                outcome.schedule_s += time.perf_counter() - started
                item.future.settle(None)
                outcome.ran[item.model_id].append(item.seq_id)
            if work.blocks:
                tokens = sum(block.tokens for block in work.blocks)
                clock += tokens
                outcome.fill.append(tokens / 4096)
            for block in work.blocks:
                started = time.perf_counter()
                whole = scheduler.completed(block)
                scheduler.block_done(block)
                outcome.schedule_s += time.perf_counter() - started
                for item in whole:
                    outcome.ran[item.model_id].append(item.seq_id)
                if block.item.blocks_left == 0:
                    block.item.future.settle(None)
                    outcome.waits["c" + block.item.model_id[1:]].append(clock - put_at[block.item])
    assert position == len(order)
    assert scheduler.stats()["queued_requests"] == 0
    assert scheduler.stats()["queued_bytes"] == 0
    return outcome
