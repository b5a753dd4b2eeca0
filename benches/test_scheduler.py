"""What scheduling and serving cost around the compute: per request, beside a flood, from HTTP to the first kernel, in a burst."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import raw_client
import serving
import torch
import zstandard

from spindle import Datum, codec
from spindle.future import Future
from spindle.scheduler import Item, Kind, Scheduler, SchedulerConfig
from spindle.server.serve import freeze_heap

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
    freeze_heap()  # as a process that only serves does: torch's objects are none of the scheduler's
    cost = benchmark.pedantic(lambda: run_through(depth, 10_000 // depth), rounds=3, iterations=1, warmup_rounds=1)
    figures["schedule_us_at_depth_10000" if depth == 10_000 else "schedule_us_per_request"] = round(cost, 1)


def p95(values: list[float]) -> float:
    return float(np.percentile(values, 95))


def test_fairness_beside_a_flood(figures):
    """One client floods 64 requests of 8,192 tokens; another's forward_backward of 64 tokens and step, against the same alone."""
    with serving.server(SchedulerConfig(token_budget=1024), max_position_embeddings=1024) as (engine, _):
        small = engine.create_adapter(rank=8, seed=0, client="small")
        flood = engine.create_adapter(rank=8, seed=0, client="flood")

        def once() -> float:
            started = time.perf_counter()
            trained = small.forward_backward([serving.datum(64)])
            small.optim_step().result(60)
            trained.result(60)
            return time.perf_counter() - started

        worker = engine._loops[0].executor.worker
        run, floods = worker.run, []

        def timed(batch):
            started = time.perf_counter()
            results = run(batch)
            if len(batch.tokens) == 1024:
                floods.append(time.perf_counter() - started)
            return results

        worker.run = timed
        long = [serving.datum(1024, seed=i) for i in range(8)]
        [once() for _ in range(5)]
        alone = [once() for _ in range(40)]
        flooding = [flood.forward(long) for _ in range(64)]
        beside = []
        while not flooding[-1].done() and len(beside) < 200:
            beside.append(once())
        assert len(beside) >= 20, "the flood was over too soon to measure"
        assert sum(future.done() for future in flooding) < 64
        for future in flooding:
            future.cancel()
        micro_batch_s = float(np.median(floods))
        figures["fair_p95_over_solo"] = round((p95(beside) - micro_batch_s) / p95(alone), 2)
        figures["fair"] = {"solo_p95_ms": p95(alone) * 1e3, "beside_p95_ms": p95(beside) * 1e3, "micro_batch_ms": micro_batch_s * 1e3}


def test_decode_overlaps_compute(figures):
    """Requests whose decode costs as much as their compute: the wall time of a pipeline of them, over the larger of the two alone."""
    with serving.server(SchedulerConfig(token_budget=8192)) as (engine, _):
        adapter = engine.create_adapter(rank=8, seed=0)
        bodies = [heavy_to_decode(adapter.model_id, seq) for seq in range(1, 41)]
        torch.set_num_threads(1)

        def decode(some: list[bytes]) -> float:
            started = time.perf_counter()
            for body in some:
                engine.scan(body, "zstd").release()
            return time.perf_counter() - started

        decode(bodies[:4])
        engine.submit(bodies[0], "zstd").result(60)
        decode_s = decode(bodies[1:])
        before = engine.stats()["compute_s"]
        started = time.perf_counter()
        futures = [engine.submit(body, "zstd") for body in bodies[1:]]
        for future in futures:
            future.result(60)
        wall = time.perf_counter() - started
        compute_s = engine.stats()["compute_s"] - before
        assert engine.resident(adapter.model_id).adapter.grads is not None
        figures["overlap_over_larger"] = round(wall / max(decode_s, compute_s), 2)
        figures["overlap"] = {"decode_s": decode_s, "compute_s": compute_s, "wall_s": wall}


def heavy_to_decode(model_id: str, seq_id: int) -> bytes:
    """Little to compute (a short sequence), much to decode: incompressible bytes in a field that the scanner skips."""
    body = codec.encode_request(model_id, seq_id, [serving.datum(96)], "cross_entropy")
    noise = np.random.default_rng(seq_id).integers(0, 48, 16 << 20, dtype=np.uint8).tobytes()
    length, field = len(noise), bytes([(15 << 3) | 2])
    varint = bytes((length >> shift & 127) | 128 for shift in range(0, 21, 7)) + bytes([length >> 21])
    return zstandard.compress(body + field + varint + noise, 1)


def test_overhead_around_compute(figures):
    """A small request on an idle engine over HTTP, from a client in a process of its own: from its send to the first kernel, from the
    last kernel to its answer, and a whole optim_step."""
    with serving.server() as (engine, url):
        model_id = serving.RawClient(url).create_model(1)
        worker = engine._loops[0].executor.worker
        run, kernels, answers = worker.run, [], []

        def timed(batch):
            started = time.perf_counter()
            results = run(batch)
            kernels.append((started, time.perf_counter()))
            answers.append(results[0].logprobs.shape)
            return results

        worker.run = timed
        lines = []
        for seq_id in range(1, 401, 2):
            body = codec.encode_request(model_id, seq_id, [serving.datum(5)], "cross_entropy")
            lines.append(["train", raw_client.http_request("forward_backward", body, "application/x-protobuf")])
            step = json.dumps({"model_id": model_id, "seq_id": seq_id + 1, "adam_params": {"learning_rate": 1e-4}}).encode()
            lines.append(["step", raw_client.http_request("optim_step", step)])
        text = "\n".join(json.dumps([kind, base64.b64encode(request).decode()]) for kind, request in lines)
        command = [sys.executable, raw_client.__file__, *url.removeprefix("http://").split(":")]
        times = json.loads(subprocess.run(command, input=text, capture_output=True, text=True, check=True, timeout=120).stdout)
        trained = [(sent, got) for kind, sent, got in times if kind == "train"]
        assert len(trained) == len(kernels) == 200 and set(answers) == {(5,)}
        assert engine.stats()["optim_steps"] == 200
        figures["overhead_in_ms_p50"] = median_ms([first - sent for (sent, _), (first, _) in zip(trained, kernels, strict=True)])
        figures["overhead_out_ms_p50"] = median_ms([got - last for (_, got), (_, last) in zip(trained, kernels, strict=True)])
        figures["optim_step_ms_p50"] = median_ms([got - sent for kind, sent, got in times if kind == "step"])


def median_ms(seconds: list[float]) -> float:
    return round(float(np.median(seconds)) * 1e3, 2)


def test_a_burst_of_bodies(figures):
    """208 uncompressed bodies of 3.3 MB at once: until all are accepted, decoded and queued; heartbeats meanwhile; none lost."""
    bodies, senders = 208, 8
    with serving.server(SchedulerConfig(token_budget=4096), max_position_embeddings=4096) as (engine, url):
        client = serving.RawClient(url)
        model_id = client.create_model(1)
        hold = threading.Event()  # computing them is not the question: the device waits
        worker = engine._loops[0].executor.worker
        run = worker.run
        worker.run = lambda batch: (hold.wait(120), run(batch))[1]
        encoded = [burst_body(model_id, seq_id) for seq_id in range(1, bodies + 1)]
        assert 3.2e6 < len(encoded[0]) < 3.4e6
        request_ids: list[str] = []
        beats: list[float] = []
        over = threading.Event()

        def send(part: list[bytes]) -> None:
            own = serving.RawClient(url, client.session)
            request_ids.extend([own.train(body) for body in part])

        def beat() -> None:
            own = serving.RawClient(url, client.session)
            while not over.is_set():
                started = time.perf_counter()
                own.post("session_heartbeat", {"session_id": client.session})
                beats.append(time.perf_counter() - started)
                time.sleep(0.02)

        threads = [threading.Thread(target=send, args=(encoded[i::senders],)) for i in range(senders)]
        heart = threading.Thread(target=beat)
        heart.start()
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        burst_s = time.perf_counter() - started
        over.set()
        heart.join()
        queued = engine.stats()["queue"]["queued_requests"]
        figures["burst_s"] = round(burst_s, 2)
        figures["burst_lost"] = bodies - min(len(set(request_ids)), queued)
        figures["heartbeat_ms_p95"] = round(p95(beats) * 1e3, 1)
        engine.unload(model_id)
        hold.set()


def burst_body(model_id: str, seq_id: int) -> bytes:
    """Dense [N, 20] targets and weights over 3,400 tokens in all: 3.3 MB."""
    rng = np.random.default_rng(seq_id)
    data = []
    for _ in range(4):
        n = 3425
        targets = rng.integers(0, 2048, (n, 20))
        data.append(Datum(rng.integers(0, 2048, n), {"target_tokens": targets, "weights": np.ones((n, 20), np.float32)}))
    return codec.encode_request(model_id, seq_id, data, "cross_entropy")
