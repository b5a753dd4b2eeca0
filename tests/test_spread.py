"""An engine whose base model is spread over groups of devices: the answers of one device, and micro-batches under way at once."""

from __future__ import annotations

import socket
import threading

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import spindle
from spindle import AdamParams, Datum, SamplingParams, SchedulerConfig
from spindle.cli import app
from spindle.compute.model import BaseModel
from spindle.errors import ServerError, UserError
from spindle.future import Future
from spindle.scheduler import Item, Kind, Scheduler
from tests.tiny import VOCAB, tiny_llama

LAYERS = 3


@pytest.fixture(scope="module")
def model():
    return BaseModel.load(tiny_llama(num_hidden_layers=LAYERS, tied=True))


@pytest.fixture(autouse=True)
def one_thread():
    """Of torch, everywhere: how a product is cut among threads may change its last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def spread(model):
    with spindle.Engine(model, devices=["cpu", "cpu"], layers_per_device=2, scheduler=SchedulerConfig(token_budget=16)) as engine:
        yield engine


def datum(length, seed=0):
    tokens = np.random.default_rng(seed).integers(0, VOCAB, length + 1)
    return Datum(tokens[:-1], {"target_tokens": tokens[1:], "weights": np.ones(length, np.float32)})


def everything(engine):
    """Logprobs, parameters, accumulated gradients and samples of three adapters after three steps."""
    adapters = [engine.create_adapter(rank=rank, seed=rank) for rank in (4, 2, 4)]
    outputs, samples = [], []
    for step in range(3):
        for i, adapter in enumerate(adapters):
            outputs.append(adapter.forward_backward([datum(n, n + step + i) for n in (7, 12, 5, 9, 16, 3, 11)]))  # several micro-batches
            outputs.append(adapter.forward_backward([datum(6, step)]))  # a part of one
            outputs.append(adapter.forward([datum(10, step)]))
        for adapter in adapters:
            adapter.optim_step(AdamParams(learning_rate=1e-2))
    for adapter in adapters:
        outputs.append(adapter.forward_backward([datum(n, n) for n in (14, 12, 6)]))
        for temperature in (0.0, 1.0):
            params = SamplingParams(max_tokens=8, temperature=temperature, seed=5, stop=[])
            samples.append(adapter.sample(np.arange(1, 20), params))
    logprobs = [o["logprobs"] for output in outputs for o in output.result(120).loss_fn_outputs]
    tokens = [s.result(120).sequences[0].tokens for s in samples]
    states = [engine.resident(adapter.model_id).adapter for adapter in adapters]
    return logprobs, tokens, [t.clone() for state in states for t in (state.params, state.exp_avg_sq, state.grads)]


@pytest.fixture(scope="module")
def expected(model):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with spindle.Engine(model, devices=["cpu"], scheduler=SchedulerConfig(token_budget=16)) as engine:
        result = everything(engine)
    torch.set_num_threads(before)
    return result


@pytest.mark.parametrize(
    ("devices", "layers_per_device", "options"),
    [(2, 2, {}), (2, 2, {"prefetch": False}), (3, 1, {"activation_bytes": 0}), (4, 2, {})],
    ids=["a group of two", "without prefetch", "a group of three, recomputing", "two groups"],
)
def test_a_spread_engine_gives_the_bits_of_one_device(model, expected, devices, layers_per_device, options):
    config = SchedulerConfig(token_budget=16)
    with spindle.Engine(model, devices=["cpu"] * devices, layers_per_device=layers_per_device, scheduler=config, **options) as engine:
        logprobs, tokens, tensors = everything(engine)
        counts = [loop.executor.counts["micro_batches"] for loop in engine._loops]
        assert len(counts) == devices and all(counts), "every thread must have had work"
        stats = engine.stats()
    assert all(map(np.array_equal, logprobs, expected[0])) and len(logprobs) == len(expected[0])
    assert all(map(np.array_equal, tokens, expected[1]))
    assert all(map(torch.equal, tensors, expected[2]))
    assert len(stats["device_busy_s"]) == devices and all(busy > 0 for busy in stats["device_busy_s"])
    assert stats["sampler"]["sampled_tokens"] > 0


def test_one_thread_of_a_group_samples_and_all_share_its_tensors(model):
    with spindle.Engine(model, devices=["cpu"] * 4, layers_per_device=2) as engine:
        assert [loop.sampler is not None for loop in engine._loops] == [True, False, True, False]
        models = [loop.executor.worker.model for loop in engine._loops]
        assert len(set(map(id, models))) == 4 and engine.model is models[0]
        assert all(one.devices == (torch.device("cpu"),) * 2 and one.layers_per_device == 2 for one in models)
        for one in models[1:]:
            assert all(a is b for a, b in zip(models[0].model.parameters(), one.model.parameters(), strict=True))


@pytest.mark.parametrize("requests", ["one large", "many small"])
def test_a_stage_works_on_the_next_micro_batch_while_the_other_finishes_the_first(spread, requests):
    """Stage 2 of the first micro-batch waits for stage 1 of the second, and the other way round: alone, neither would ever end."""
    first_in_stage_2, second_in_stage_1 = threading.Event(), threading.Event()
    lock, entered, met = threading.Lock(), [], []

    def stage_1(*_):
        with lock:
            entered.append(threading.get_ident())
            number = len(set(entered))
        if number == 2 and threading.get_ident() != entered[0]:
            second_in_stage_1.set()
            met.append(first_in_stage_2.wait(30))

    def stage_2(*_):
        if threading.get_ident() == entered[0]:
            first_in_stage_2.set()
            met.append(second_in_stage_1.wait(30))

    handles = []
    for loop in spread._loops:
        layers = loop.executor.worker.model._layers
        handles += [layers[0].register_forward_pre_hook(stage_1), layers[2].register_forward_pre_hook(stage_2)]
    adapter = spread.create_adapter(rank=4, seed=1)
    data = [datum(12, seed) for seed in range(4)]  # two do not share a micro-batch
    futures = [adapter.forward_backward(data)] if requests == "one large" else [adapter.forward_backward([one]) for one in data]
    assert all(np.isfinite(future.result(120).loss) for future in futures)
    assert len(met) >= 2 and all(met)
    for handle in handles:
        handle.remove()


def test_an_optimizer_step_waits_for_both_threads_and_a_failure_stays_where_it_is(spread, monkeypatch):
    adapter, neighbour = (spread.create_adapter(rank=4, seed=1) for _ in range(2))
    worker = spread._loops[1].executor.worker
    run, go = worker.run, threading.Event()

    def slow(batch):
        assert go.wait(30)
        return run(batch)

    monkeypatch.setattr(worker, "run", slow)
    output = adapter.forward_backward([datum(12, seed) for seed in range(6)])
    step = adapter.optim_step()
    with pytest.raises(TimeoutError):
        step.result(0.3)
    go.set()
    assert step.result(60).metrics["grad_norm"] > 0 and np.isfinite(output.result(60).loss)
    monkeypatch.setattr(worker, "run", lambda batch: (_ for _ in ()).throw(RuntimeError("the card fell out")))
    broken = adapter.forward_backward([datum(12, seed) for seed in range(6)])
    monkeypatch.setattr(spread._loops[0].executor.worker, "run", lambda batch: (broken.exception(30), run(batch))[1])
    with pytest.raises(ServerError, match="the card fell out"):
        broken.result(60)
    monkeypatch.undo()
    assert np.isfinite(neighbour.forward([datum(5)]).result(60).loss)
    assert adapter.forward_backward([datum(5)]).result(60).loss > 0


def test_a_request_that_ends_before_the_one_in_front_of_it_is_committed_behind_it(model, monkeypatch):
    gradients = []
    for devices in (1, 2):
        config = SchedulerConfig(token_budget=16)
        with spindle.Engine(model, devices=["cpu"] * devices, layers_per_device=4 - devices, scheduler=config, prefetch=False) as engine:
            adapter = engine.create_adapter(rank=4, seed=1)
            held, go = threading.Event(), threading.Event()
            worker = engine._loops[-1].executor.worker
            if devices == 2:
                run = worker.run
                monkeypatch.setattr(worker, "run", lambda batch, run=run, held=held, go=go: (held.set(), go.wait(60), run(batch))[2])
            first = adapter.forward_backward([datum(12, seed) for seed in range(6)])
            if devices == 2:
                assert held.wait(60)  # with one of its blocks
            second = adapter.forward_backward([datum(9)])
            assert second.result(60).loss > 0
            assert devices == 1 or not first.done()
            go.set()
            assert first.result(60).loss > 0
            gradients.append(engine.resident(adapter.model_id).adapter.grads)
            assert adapter.optim_step().result(60).metrics["grad_norm"] > 0
    assert torch.equal(*gradients)


def test_what_cannot_be_spread_is_refused(model):
    with pytest.raises(UserError, match="devices: got 3 with layers_per_device 2; 3 layers need groups of 2 devices, so name a multiple"):
        spindle.Engine(model, devices=["cpu"] * 3, layers_per_device=2)
    with pytest.raises(UserError, match="layers_per_device: got 4; allowed is a whole number from 1 to 3"):
        spindle.Engine(model, devices=["cpu"], layers_per_device=4)


def test_the_command_line_takes_layers_per_device(tmp_path):
    tiny_llama(save=tmp_path / "tiny")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    result = CliRunner().invoke(app, ["serve", str(tmp_path / "tiny"), "--devices", "cpu,cpu", "--layers-per-device", "3", "--port", port])
    assert result.exit_code == 1
    assert "layers_per_device: got 3; allowed is a whole number from 1 to 2" in " ".join(result.output.split())


def test_what_is_at_home_with_one_thread_of_a_group_may_run_on_each():
    scheduler = Scheduler(SchedulerConfig(token_budget=16), devices=4, per_group=2)
    scheduler.add_adapter("a", "client", home=3)
    for seq_id in (1, 2, 3):
        item = Item("a", seq_id, Kind.TRAIN, Future())
        item.cut(np.array([12]), 16)
        scheduler.put(item)
    assert scheduler.next_work(0, 0.0) is None and scheduler.next_work(1, 0.0) is None
    taken = [scheduler.next_work(device, 0.0).blocks for device in (2, 3, 2)]
    assert [block.item.seq_id for blocks in taken for block in blocks] == [1, 2, 3]
