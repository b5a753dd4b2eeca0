"""The engine in this process: the whole road from arrays or bytes to answers, on a tiny model."""

import asyncio
import gc
import threading
import time
import weakref

import numpy as np
import pytest
import torch

import spindle
from spindle import AdamParams, Datum, SchedulerConfig, codec, losses
from spindle.compute.model import BaseModel
from spindle.errors import Conflict, EngineClosed, InvalidRequest, MalformedBody, NotFound, ServerError, UserError
from spindle.operations import OptimStep, Publish
from tests.tiny import VOCAB, tiny_llama


@pytest.fixture(scope="module")
def model():
    return BaseModel.load(tiny_llama())


@pytest.fixture
def engine(model):
    with spindle.Engine(model) as engine:
        yield engine


def datum(length, seed=0, **inputs):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCAB, length + 1)
    return Datum(tokens[:-1], {"target_tokens": tokens[1:], "weights": np.ones(length, np.float32)} | inputs)


def body(model_id, seq_id, data, **options):
    return codec.encode_request(model_id, seq_id, data, "cross_entropy", **options)


def threads():
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("spindle")}


def test_training_lowers_the_loss_and_every_call_is_a_future(engine):
    adapter = engine.create_adapter(rank=4, seed=1)
    losses = []
    for _ in range(6):
        forward_backward = adapter.forward_backward([datum(12)])
        step = adapter.optim_step(AdamParams(learning_rate=1e-2))
        losses.append(forward_backward.result(60).loss)
        assert step.result(60).metrics["grad_norm"] > 0
    assert losses[-1] < 0.5 * losses[0]


def test_futures_can_be_awaited(engine):
    adapter = engine.create_adapter(rank=4, seed=1)

    async def go():
        output = await adapter.forward([datum(5)])
        return output.loss

    loss = asyncio.run(go())
    assert loss == adapter.forward([datum(5)]).result(60).loss


def test_the_answer_keeps_input_order_and_shapes(engine):
    adapter = engine.create_adapter(rank=4, seed=1)
    lengths = [7, 2, 5, 3]
    data = [datum(n, seed=n) for n in lengths]
    wide = Datum(data[0].tokens, {"target_tokens": np.arange(21)[None].repeat(7, 0), "weights": np.ones((7, 21), np.float32)})
    output = adapter.forward([*data, wide]).result(60)
    assert [o["logprobs"].shape for o in output.loss_fn_outputs] == [(7,), (2,), (5,), (3,), (7, 21)]
    for n, together in zip(lengths, output.loss_fn_outputs, strict=False):
        alone = adapter.forward([datum(n, seed=n)]).result(60)
        assert np.array_equal(alone.loss_fn_outputs[0]["logprobs"], together["logprobs"])


def test_raw_bytes_in_raw_bytes_out(engine):
    adapter = engine.create_adapter(rank=4, seed=1)
    data = [datum(9), datum(4, seed=3)]
    expected = adapter.forward(data).result(60)
    for seq_id, (encoding, compress) in enumerate([("zstd", True), (None, False)], start=2):
        answer = engine.submit(body(adapter.model_id, seq_id, data, forward_only=True, zstd=compress), encoding).result(60)
        output = codec.decode_forward_backward(answer)
        assert output.metrics["loss:sum"] == expected.loss
        for ours, theirs in zip(output.loss_fn_outputs, expected.loss_fn_outputs, strict=True):
            assert np.array_equal(ours["logprobs"], theirs["logprobs"])


def test_requests_that_arrive_in_any_order_run_in_seq_id_order(engine):
    adapters = [engine.create_adapter(rank=4, seed=1) for _ in range(2)]
    bodies = [[body(a.model_id, seq, [datum(6, seed=seq)]) for seq in (1, 2, 3)] for a in adapters]
    forwards = [engine.submit(b).result(60) for b in bodies[0]]
    backwards = [engine.submit(b) for b in reversed(bodies[1])]
    assert [f.result(60) for f in reversed(backwards)] == forwards
    states = [engine.resident(a.model_id).adapter.grads for a in adapters]
    assert torch.equal(*states)


def test_steps_submitted_without_waiting_equal_waiting_for_each(engine):
    ends = []
    for wait in (True, False):
        adapter = engine.create_adapter(rank=4, seed=1)
        futures = []
        for step in range(4):
            futures.append(adapter.forward_backward([datum(9, seed=step), datum(5, seed=step + 9)]))
            futures.append(adapter.optim_step(AdamParams(learning_rate=1e-2)))
            if wait:
                [f.result(60) for f in futures]
        [f.result(60) for f in futures]
        ends.append(engine.resident(adapter.model_id).adapter.params)
    assert torch.equal(*ends)


@pytest.mark.parametrize("budget", [8, 16, 64])
def test_the_micro_batch_budget_does_not_change_the_gradient(model, budget):
    norms = []
    for tokens in (budget, 4096):
        with spindle.Engine(model, scheduler=SchedulerConfig(token_budget=tokens)) as engine:
            adapter = engine.create_adapter(rank=4, seed=1)
            output = adapter.forward_backward([datum(n, seed=n) for n in (7, 12, 5, 9)]).result(60)
            norms.append(adapter.optim_step().result(60).metrics["grad_norm"])
            assert [len(o["logprobs"]) for o in output.loss_fn_outputs] == [7, 12, 5, 9]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


def sparse(length, rows, seed):
    """[N, 3] targets and weights of which few rows are not zero."""
    rng = np.random.default_rng(seed)
    targets, weights = np.zeros((length, 3), np.int64), np.zeros((length, 3), np.float32)
    targets[rows], weights[rows] = rng.integers(1, VOCAB, (len(rows), 3)), rng.normal(size=(len(rows), 3))
    return datum(length, seed, target_tokens=targets, weights=weights)


def test_what_a_micro_batch_leaves_in_its_buffers_is_not_felt(model, monkeypatch):
    """The same requests in an engine that reuses buffers, and in one that takes fresh ones each time: the same bits."""
    calls = [
        [sparse(90, [80], 1), sparse(40, [0, 20], 2)],
        [datum(70, 3)],  # every cell written
        [sparse(200, [7], 4)],
        [datum(30, 5), datum(25, 6)],
        [sparse(100, [99], 7), sparse(64, [], 8)],
    ]

    def answers():
        with spindle.Engine(model) as engine:
            adapter = engine.create_adapter(rank=4, seed=1)
            outputs = [adapter.forward_backward(data).result(60) for data in calls]
            kept = engine.stats()["buffer_bytes"]
            pool = engine._loops[0].executor.buffers
            for buffers in pool._kept:
                assert not buffers.zeroed or not (buffers.targets.any() or buffers.inputs.view(torch.int32).any())
            return outputs, kept

    reused, kept = answers()
    assert kept > 0
    monkeypatch.setattr("spindle.compute.buffers.BufferPool.give_back", lambda self, buffers: None)
    fresh, none = answers()
    assert none == 0
    for a, b in zip(reused, fresh, strict=True):
        assert a.metrics == b.metrics
        for x, y in zip(a.loss_fn_outputs, b.loss_fn_outputs, strict=True):
            assert x["logprobs"].tobytes() == y["logprobs"].tobytes()


def test_two_devices_equal_one_and_themselves(model):
    ends = []
    for devices in (["cpu"], ["cpu", "cpu"], ["cpu", "cpu"]):
        with spindle.Engine(model, devices=devices, scheduler=SchedulerConfig(token_budget=16)) as engine:
            adapter = engine.create_adapter(rank=4, seed=1)
            for step in range(3):
                adapter.forward_backward([datum(n, seed=n + step) for n in (7, 12, 5, 9, 16, 3, 11)])
                adapter.forward_backward([datum(n, seed=n + step) for n in (14, 12, 6)])
                adapter.optim_step(AdamParams(learning_rate=1e-2)).result(60)
            ends.append(engine.resident(adapter.model_id).adapter.params.clone())
            used = [loop.executor.counts["micro_batches"] for loop in engine._loops]
            assert all(used), "every device must have had work"
    torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=1e-6)
    assert torch.equal(ends[1], ends[2])


def test_a_bad_request_fails_alone_and_takes_its_place(engine):
    adapter = engine.create_adapter(rank=4, seed=1)
    good = [datum(6)]
    bad = [datum(6), Datum([1, 2], {"weights": np.ones(2, np.float32)})]
    futures = [adapter.forward(good), adapter.forward(bad), adapter.forward(good)]
    with pytest.raises(InvalidRequest, match="datum 1: target_tokens is missing"):
        futures[1].result(60)
    assert futures[0].result(60).loss == futures[2].result(60).loss


def test_bad_bodies_through_the_raw_door(engine):
    adapter = engine.create_adapter(rank=4, seed=1)
    with pytest.raises(MalformedBody):
        engine.submit(b"\xff\xff\xff", None).result(60)
    with pytest.raises(NotFound, match="no adapter 'nobody'"):
        engine.submit(body("nobody", 1, [datum(3)])).result(60)
    with pytest.raises(InvalidRequest, match="datum 0"):
        engine.submit(body(adapter.model_id, 1, [Datum([1, VOCAB], {"target_tokens": [1, 1]})])).result(60)
    engine.submit(body(adapter.model_id, 2, [datum(3)])).result(60)
    with pytest.raises(Conflict, match="seq_id 2"):
        engine.submit(body(adapter.model_id, 2, [datum(4)])).result(60)


def test_a_failing_device_fails_only_what_it_held_and_leaves_the_adapter(engine, monkeypatch):
    adapter = engine.create_adapter(rank=4, seed=1)
    adapter.forward_backward([datum(6)]).result(60)
    before = engine.resident(adapter.model_id).adapter.grads.clone()
    worker = engine._loops[0].executor.worker
    run = worker.run
    monkeypatch.setattr(worker, "run", lambda batch: (_ for _ in ()).throw(RuntimeError("the card fell out")))
    with pytest.raises(ServerError, match=r"RuntimeError while running seq_id 2 of .*: the card fell out; the adapter is as it was before"):
        adapter.forward_backward([datum(6)]).result(60)
    monkeypatch.setattr(worker, "run", run)
    assert torch.equal(engine.resident(adapter.model_id).adapter.grads, before)
    assert adapter.optim_step().result(60).metrics["grad_norm"] > 0


def test_out_of_memory_runs_halves_then_says_so(engine, monkeypatch):
    adapters = [engine.create_adapter(rank=4, seed=1) for _ in range(4)]
    worker = engine._loops[0].executor.worker
    run, limit = worker.run, [12]

    def small(batch):
        if len(batch.tokens) > limit[0]:
            raise torch.OutOfMemoryError("no room")
        return run(batch)

    expected = adapters[0].forward([datum(6)]).result(60).loss
    monkeypatch.setattr(worker, "run", small)
    held = threading.Event()
    blocker = engine.create_adapter(rank=4, seed=1)
    monkeypatch.setattr(worker, "run", lambda batch: (held.wait(10), small(batch))[1])
    first = blocker.forward([datum(3)])
    time.sleep(0.05)
    futures = [adapter.forward([datum(6)]) for adapter in adapters]
    held.set()
    first.result(60)
    assert [f.result(60).loss for f in futures] == [expected] * 4
    limit[0] = 2
    with pytest.raises(ServerError, match="out of memory on the device even with one sequence of seq_id 3 at a time; send shorter"):
        adapters[0].forward([datum(6)]).result(60)


def test_halves_of_a_micro_batch_give_what_the_whole_gives(engine, monkeypatch):
    """Five ragged sequences, one [N, K], of a request cut through the middle, beside a neighbour's."""
    wide = Datum([4, 5, 6], {"target_tokens": np.arange(6).reshape(3, 2), "weights": np.full((3, 2), 0.5, np.float32)})
    data = [datum(7, 1), datum(12, 2), wide, datum(5, 3), datum(9, 4)]
    worker = engine._loops[0].executor.worker
    run, most = worker.run, [1000]

    def small(batch):
        if len(batch.tokens) > most[0]:
            raise torch.OutOfMemoryError("no room")
        return run(batch)

    monkeypatch.setattr(worker, "run", small)
    answers = []
    for limit in (1000, 25, 12):
        most[0] = limit
        adapter = engine.create_adapter(rank=4, seed=1)
        output = adapter.forward_backward(data).result(60)
        answers.append((output, adapter.optim_step().result(60).metrics["grad_norm"]))
    whole, norm = answers[0]
    for output, other_norm in answers[1:]:
        assert other_norm == pytest.approx(norm, rel=1e-6)
        assert output.loss == pytest.approx(whole.loss, rel=1e-6)
        for ours, theirs in zip(output.loss_fn_outputs, whole.loss_fn_outputs, strict=True):
            assert ours["logprobs"].shape == theirs["logprobs"].shape
            np.testing.assert_allclose(ours["logprobs"], theirs["logprobs"], atol=1e-6)


def test_a_cancelled_request_does_not_run(engine, monkeypatch):
    adapter = engine.create_adapter(rank=4, seed=1)
    worker = engine._loops[0].executor.worker
    run, go = worker.run, threading.Event()
    monkeypatch.setattr(worker, "run", lambda batch: (go.wait(10), run(batch))[1])
    first, step, last = adapter.forward_backward([datum(5)]), adapter.optim_step(), adapter.forward([datum(5)])
    assert last.cancel()
    go.set()
    first.result(60), step.result(60)
    time.sleep(0.05)
    assert engine.stats()["trained_tokens"] == 5 and engine.stats()["forward_tokens"] == 0
    assert engine.stats()["queue"]["queued_requests"] == 0


def test_save_and_load_with_and_without_the_optimizer(engine, tmp_path):
    adapter = engine.create_adapter(rank=4, seed=1)
    for step in range(3):
        adapter.forward_backward([datum(8, seed=step)])
        adapter.optim_step(AdamParams(learning_rate=1e-2))
    saved = adapter.save(tmp_path / "a").result(60)
    state = engine.resident(adapter.model_id).adapter
    for with_optimizer in (True, False):
        other = engine.create_adapter(rank=4, seed=2)
        other.load(saved, with_optimizer).result(60)
        theirs = engine.resident(other.model_id).adapter
        assert torch.equal(theirs.params, state.params)
        assert theirs.step == (3 if with_optimizer else 0)
        assert torch.equal(theirs.exp_avg, state.exp_avg) is with_optimizer
    with pytest.raises(InvalidRequest):
        adapter.save(tmp_path / "a").result(60)
    adapter.save(tmp_path / "a", replace=True).result(60)
    wrong = engine.create_adapter(rank=8, seed=2)
    with pytest.raises(UserError):
        wrong.load(saved).result(60)


def test_sampling_uses_the_weights_as_published(engine):
    adapter = engine.create_adapter(rank=4, seed=1)
    greedy = spindle.SamplingParams(max_tokens=6, temperature=0.0, stop=[])
    base = engine.sample(None, [1, 2, 3], greedy).result(60).sequences[0].tokens
    before = adapter.publish().result(60)
    for _ in range(5):
        adapter.forward_backward([datum(12)])
        adapter.optim_step(AdamParams(learning_rate=5e-2))
    after = adapter.sample([1, 2, 3], greedy).result(60).sequences[0].tokens
    again = engine.sample(before, [1, 2, 3], greedy).result(60).sequences[0].tokens
    assert np.array_equal(base, again)
    assert not np.array_equal(base, after)


def test_the_same_seed_gives_the_same_gradient(engine):
    norms = []
    for _ in range(2):
        adapter = engine.create_adapter(rank=4, seed=7)
        adapter.forward_backward([datum(8)])
        norms.append(adapter.optim_step().result(60).metrics["grad_norm"])
    assert norms[0] == norms[1]


def test_impossible_settings_are_refused_by_name(model, engine):
    for kwargs, text in [
        ({"rank": 0}, "rank: got 0; allowed is a whole number from 1 to 4096"),
        ({"train_mlp": False, "train_attn": False, "train_unembed": False}, "there is nothing to train"),
        ({"optimizer": "sgd"}, "optimizer: got 'sgd'; allowed are adamw, dimuon"),
    ]:
        with pytest.raises(UserError, match=text):
            engine.create_adapter(**kwargs)
    with pytest.raises(UserError, match=r"sampling_share: got 1\.0"):
        spindle.Engine(model, sampling_share=1.0)
    with pytest.raises(UserError, match="sampler is 'dice'; allowed: spindle, vllm"):
        spindle.Engine(model, sampler="dice")
    with pytest.raises(UserError, match="dtype: got 'float16'; allowed are float32 and bfloat16"):
        spindle.Engine(tiny_llama(), dtype="float16")
    with pytest.raises(UserError, match="devices: 'abacus' is no torch device"):
        spindle.Engine(model, devices=["abacus"])


def test_unload_fails_what_waits_and_frees_the_name(engine):
    adapter = engine.create_adapter(rank=4, seed=1, model_id="mine")
    waiting = engine.submit(body("mine", 5, [datum(3)]))
    adapter.unload()
    with pytest.raises(NotFound, match="adapter 'mine' was unloaded"):
        waiting.result(60)
    with pytest.raises(NotFound, match="no adapter 'mine'"):
        adapter.optim_step()
    engine.create_adapter(rank=4, seed=1, model_id="mine")


def test_close_ends_every_thread_and_fails_what_waits(model):
    before = threads()
    engine = spindle.Engine(model)
    adapter = engine.create_adapter(rank=4, seed=1)
    waiting = engine.submit(body(adapter.model_id, 3, [datum(3)]))
    engine.close()
    engine.close()
    with pytest.raises(EngineClosed):
        waiting.result(5)
    with pytest.raises((EngineClosed, NotFound)):
        adapter.forward([datum(3)])
    assert threads() == before


def spanned(adapter, seq_id, prompt, sequence, sequence_id, advantages, offset=0):
    """A body of one datum whose sampled tokens are named by a span. Position i predicts what follows token i."""
    tokens = np.concatenate([prompt, sequence])
    n = len(tokens) - 1
    q = np.zeros(n, np.float32)  # what the client says: not used
    spans = [("prompt_tokens", "", 0, len(prompt) - 1), ("sampled_tokens", sequence_id, offset, len(sequence))]
    one = Datum(tokens[:-1], {"target_tokens": tokens[1:], "logprobs": q, "advantages": advantages}, spans, spans)
    return codec.encode_request(adapter.model_id, seq_id, [one], "stable_reinforce")


def test_stable_reinforce_reads_what_our_sampler_recorded(engine):
    adapter = engine.create_adapter(rank=4, seed=1, session="s")
    snapshot = engine.submit_operation(adapter.model_id, 1, Publish()).result(60)
    prompt = np.array([5, 6, 7])
    params = spindle.SamplingParams(max_tokens=6, stop=[], seed=3)
    sampled = engine.sample(snapshot, prompt, params, record_stability_info=True, sequence_ids=["q1"], session="s").result(60).sequences[0]
    advantages = np.array([0, 0] + [1.0] * 6, np.float32)
    answer = engine.submit(spanned(adapter, 2, prompt, sampled.tokens, "q1", advantages)).result(60)
    output = codec.decode_forward_backward(answer)
    p = output.loss_fn_outputs[0]["logprobs"][2:]
    assert np.allclose(p, sampled.logprobs, atol=1e-5)
    assert output.loss == pytest.approx(-p.sum(), rel=1e-4), "on policy: r = 1, no pull"
    step = engine.submit_operation(adapter.model_id, 3, OptimStep(AdamParams()))
    assert step.result(60).metrics["grad_norm"] > 0
    for seq_id, (body, text) in enumerate(
        [
            ((sampled.tokens, "q2", advantages), "datum 0: loss_fn_input_spans: sequence_id 'q2' names no recorded sample"),
            ((sampled.tokens, "q1", advantages, 1), r"\[1, 7\) of sequence 'q1', which has 6 sampled tokens"),
            ((sampled.tokens, "q1", np.ones(8, np.float32)), "advantages: not 0 at a token that no sampled_tokens span covers"),
        ],
        start=4,
    ):
        with pytest.raises(InvalidRequest, match=text):
            engine.submit(spanned(adapter, seq_id, prompt, *body)).result(60)
    other = engine.create_adapter(rank=4, seed=1, session="t")
    with pytest.raises(InvalidRequest, match="names no recorded sample of this session"):
        engine.submit(spanned(other, 1, prompt, sampled.tokens, "q1", advantages)).result(60)


def test_optimizer_steps_that_are_ready_together_run_as_one_pass_with_the_same_bits(engine, monkeypatch):
    adapters = [engine.create_adapter(rank=4, seed=1) for _ in range(4)]
    for i, adapter in enumerate(adapters):
        adapter.forward_backward([datum(9, seed=i % 2)]).result(60)
    settings = AdamParams(learning_rate=1e-2)
    adapters[0].optim_step(settings).result(60), adapters[1].optim_step(settings).result(60)
    worker = engine._loops[0].executor.worker
    held, sizes = threading.Event(), []
    run, step = worker.run, worker.optim_step
    monkeypatch.setattr(worker, "run", lambda batch: (held.wait(10), run(batch))[1])
    monkeypatch.setattr(worker, "optim_step", lambda some, params: (sizes.append(len(some)), step(some, params))[1])
    blocker = engine.create_adapter(rank=4, seed=1).forward([datum(3)])
    time.sleep(0.05)
    futures = [adapter.optim_step(settings) for adapter in adapters[2:]]
    held.set()
    blocker.result(60)
    assert all(future.result(60).metrics["grad_norm"] > 0 for future in futures)
    assert sizes == [2]
    states = [engine.resident(adapter.model_id).adapter for adapter in adapters]
    for alone, together in zip(states[:2], states[2:], strict=True):
        assert torch.equal(alone.params, together.params) and torch.equal(alone.exp_avg_sq, together.exp_avg_sq)


@pytest.mark.parametrize("prefetch", [False, True])
def test_training_and_sampling_with_and_without_prefetch(model, prefetch):
    with spindle.Engine(model, prefetch=prefetch, scheduler=SchedulerConfig(token_budget=16)) as engine:
        adapter = engine.create_adapter(rank=4, seed=1)
        for _ in range(3):
            trained = adapter.forward_backward([datum(n, seed=n) for n in (9, 14, 3, 8)])
            step = adapter.optim_step()
            sampled = adapter.sample([1, 2], spindle.SamplingParams(max_tokens=3, stop=[]))
            assert np.isfinite(trained.result(60).loss)
            assert step.result(60).metrics["grad_norm"] > 0
            assert len(sampled.result(60).sequences[0].tokens) == 3
        assert engine.stats()["trained_tokens"] == 3 * 34


def test_a_failure_while_filling_fails_only_those_requests(engine, monkeypatch):
    adapter = engine.create_adapter(rank=4, seed=1)
    executor = engine._loops[0].executor
    fill = executor._fill
    monkeypatch.setattr(executor, "_fill", lambda blocks: 1 / 0)
    with pytest.raises(ServerError, match="ZeroDivisionError while running seq_id 1"):
        adapter.forward([datum(3)]).result(60)
    monkeypatch.setattr(executor, "_fill", fill)
    adapter.forward([datum(3)]).result(60)
    assert engine.resident(adapter.model_id).users == 0


def test_spans_of_in_process_datums(engine):
    adapter = engine.create_adapter(rank=4, seed=1)
    prompt, params = np.array([5, 6, 7]), spindle.SamplingParams(max_tokens=4, stop=[], seed=3)
    sampled = adapter.sample(prompt, params, record_stability_info=True, sequence_ids=["q"]).result(60).sequences[0]
    tokens = np.concatenate([prompt, sampled.tokens])
    inputs = {"target_tokens": tokens[1:], "logprobs": np.zeros(6, np.float32), "advantages": np.array([0, 0, 1, 1, 1, 1], np.float32)}
    spans = [("prompt_tokens", "", 0, 2), ("sampled_tokens", "q", 0, 4)]
    output = adapter.forward_backward([Datum(tokens[:-1], inputs, spans, spans)], "stable_reinforce").result(60)
    assert output.loss == pytest.approx(-sampled.logprobs.sum(), rel=1e-4)
    for span, text in [
        (("tokens", "q", 0, 4), r"datum 0: loss_fn_input_spans has \('tokens', 'q', 0, 4\): a span is \(prompt_tokens or"),
        (("sampled_tokens", "q", 0), "datum 0: loss_fn_input_spans has"),
        (("sampled_tokens", "q", 0, 2**70), "datum 0: loss_fn_input_spans has"),
        (("sampled_tokens", "q", -1, 4), "loss_fn_input_spans has offset -1 and length 4: neither may be negative"),
    ]:
        with pytest.raises(InvalidRequest, match=text):
            adapter.forward_backward([Datum(tokens[:-1], inputs, spans, [spans[0], span])], "stable_reinforce").result(60)


def test_a_sample_does_not_wait_for_anothers_whole_step(model):
    with spindle.Engine(model, scheduler=SchedulerConfig(token_budget=64)) as engine:
        adapter = engine.create_adapter(rank=4, seed=1)
        long = adapter.forward_backward([datum(64, seed=i) for i in range(60)])
        sampled = engine.sample(None, [1, 2, 3], spindle.SamplingParams(max_tokens=4, stop=[]))
        sampled.result(60)
        assert not long.done()
        long.result(60)
        assert engine.stats()["micro_batches"] == 60


def test_stats_count_what_was_done(engine):
    adapter = engine.create_adapter(rank=4, seed=1, client="me")
    engine.submit(body(adapter.model_id, 1, [datum(6), datum(4)])).result(60)
    engine.submit(body(adapter.model_id, 2, [datum(3)], forward_only=True)).result(60)
    engine.submit_operation(adapter.model_id, 3, OptimStep(AdamParams())).result(60)
    engine.sample(None, [1, 2], spindle.SamplingParams(max_tokens=2, stop=[])).result(60)
    stats = engine.stats()
    assert (stats["trained_tokens"], stats["forward_tokens"], stats["optim_steps"], stats["micro_batches"]) == (10, 3, 1, 2)
    assert stats["micro_batch_fill"] == 13 / (2 * 4096)
    assert all(stats["seconds"][stage] > 0 for stage in ("scan", "wait", "fill", "forward", "backward", "optim", "encode", "sampling"))
    assert stats["compute_s"] <= stats["uptime_s"]
    assert stats["queue"]["clients"]["me"]["waits"] == 2
    assert stats["queue"]["queued_bytes"] == 0
    assert stats["adapters"] == {"device": 1, "host": 0, "disk": 0}


def test_a_prefetched_micro_batch_is_overtaken_by_another_client(model, monkeypatch):
    """While one micro-batch runs and the next lies ready, a newcomer's request runs before the one that lies ready."""
    with spindle.Engine(model, scheduler=SchedulerConfig(token_budget=16)) as engine:
        flood = engine.create_adapter(rank=4, seed=1, client="flood")
        small = engine.create_adapter(rank=4, seed=1, client="small")
        worker = engine._loops[0].executor.worker
        run, ran, go = worker.run, [], threading.Semaphore(0)

        def slow(batch):
            ran.append(batch.segments[0].tag.item.model_id)
            assert go.acquire(timeout=10)
            return run(batch)

        monkeypatch.setattr(worker, "run", slow)
        long = flood.forward([datum(16, seed=i) for i in range(6)])
        while not ran:
            time.sleep(0.01)
        time.sleep(0.2)  # the second block is filled by now
        quick = small.forward([datum(4)])
        go.release(10)
        quick.result(60), long.result(60)
        assert ran.index(small.model_id) == 1, ran


def test_an_idle_device_fills_for_itself_and_a_busy_one_has_it_done(model, monkeypatch):
    """No second thread stands between a small request and an idle device; behind one that runs, the next is prepared meanwhile."""
    with spindle.Engine(model, scheduler=SchedulerConfig(token_budget=16)) as engine:
        adapter = engine.create_adapter(rank=4, seed=1)
        executor = engine._loops[0].executor
        fill, run, fillers = executor.fill, executor.run, []

        def told(blocks):
            fillers.append(threading.current_thread().name)
            return fill(blocks)

        def slow(batch):
            deadline = time.monotonic() + 10
            while len(fillers) < 2 and time.monotonic() < deadline and len(batch.segments[0].tag.item.blocks) > 1:
                time.sleep(0.005)
            return run(batch)

        def when_idle():
            while not engine.scheduler._idle[0]:
                time.sleep(0.005)

        monkeypatch.setattr(executor, "fill", told)
        when_idle()
        adapter.forward([datum(4)]).result(60)
        assert fillers == ["spindle-device-0"]
        fillers.clear()
        monkeypatch.setattr(executor, "run", slow)
        when_idle()
        adapter.forward([datum(16, seed=i) for i in range(3)]).result(60)
        assert fillers[:2] == ["spindle-device-0", "spindle-feed-0"]


def once_the_next_lies_ready(loop):
    """The loop's ``run`` of three micro-batches, the first two of which wait until the next one is filled."""
    run = loop.executor.run

    def waiting(batch):
        deadline = time.monotonic() + 10
        while not loop._filled and batch.segments[0].tag.index < 2 and time.monotonic() < deadline:
            time.sleep(0.005)
        return run(batch)

    return waiting


@pytest.mark.parametrize("budget", [16, 4096])
def test_bytes_hold_what_the_arrays_do_however_many_micro_batches_it_took(model, budget):
    """A large answer is written as bytes while it is computed, in the order in which its datums run; a small one at its end."""
    lengths = [3, 16, 5, 2, 16, 9, 7]
    data = [datum(n, seed=n) for n in lengths]
    data[4] = Datum(data[4].tokens, {"target_tokens": np.arange(48).reshape(16, 3), "weights": np.ones((16, 3), np.float32)})
    with spindle.Engine(model, scheduler=SchedulerConfig(token_budget=budget)) as engine:
        adapter = engine.create_adapter(rank=4, seed=1)
        arrays = adapter.forward(data).result(60)
        answer = engine.submit(body(adapter.model_id, 2, data, forward_only=True)).result(60)
        assert engine.stats()["micro_batches"] == (8 if budget == 16 else 2)
    decoded = codec.decode_forward_backward(answer)
    assert decoded.metrics == arrays.metrics
    for one, other, n in zip(decoded.loss_fn_outputs, arrays.loss_fn_outputs, lengths, strict=True):
        assert one["logprobs"].shape == other["logprobs"].shape and len(one["logprobs"]) == n
        np.testing.assert_array_equal(one["logprobs"], other["logprobs"])


def test_results_are_handed_out_beside_the_next_micro_batch(model, monkeypatch):
    """While another lies ready a device does not wait for that; the last one's are handed out by the device's own thread."""
    with spindle.Engine(model, scheduler=SchedulerConfig(token_budget=16)) as engine:
        adapter = engine.create_adapter(rank=4, seed=1)
        loop = engine._loops[0]
        settle, settlers = loop.executor.settle, []

        def told(batch, results):
            settlers.append(threading.current_thread().name)
            settle(batch, results)

        monkeypatch.setattr(loop.executor, "run", once_the_next_lies_ready(loop))
        monkeypatch.setattr(loop.executor, "settle", told)
        output = adapter.forward_backward([datum(16, seed=i) for i in range(3)]).result(60)
        assert settlers == ["spindle-settle-0", "spindle-settle-0", "spindle-device-0"]
    with spindle.Engine(model, scheduler=SchedulerConfig(token_budget=64), prefetch=False) as engine:
        whole = engine.create_adapter(rank=4, seed=1).forward_backward([datum(16, seed=i) for i in range(3)]).result(60)
    for one, other in zip(output.loss_fn_outputs, whole.loss_fn_outputs, strict=True):
        np.testing.assert_allclose(one["logprobs"], other["logprobs"], atol=1e-6)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_while_results_are_handed_out_leaves_nobody_waiting(model, monkeypatch):
    before = set(threading.enumerate())
    with spindle.Engine(model, scheduler=SchedulerConfig(token_budget=16)) as engine:
        adapter = engine.create_adapter(rank=4, seed=1)
        loop = engine._loops[0]

        def broken(batch, results):
            raise RuntimeError("out of luck")

        monkeypatch.setattr(loop.executor, "run", once_the_next_lies_ready(loop))
        monkeypatch.setattr(loop.executor, "settle", broken)
        futures = [adapter.forward_backward([datum(16, seed=i) for i in range(3)]) for _ in range(3)]
        for future in futures:
            assert isinstance(future.exception(30), ServerError | EngineClosed)
        engine.close(30)
        assert not [one.name for one in threading.enumerate() if one.name.startswith("spindle") and one not in before]


def test_idle_threads_keep_nothing_of_what_they_ran(model):
    with spindle.Engine(model, scheduler=SchedulerConfig(token_budget=16)) as engine:
        for _ in range(3):
            handle = engine.create_adapter(rank=4, seed=1)
            handle.forward_backward([datum(16, seed=i) for i in range(5)])
            handle.optim_step()
            handle.publish().result(60)
            gone = weakref.ref(engine.resident(handle.model_id).adapter)
            handle.unload()
            deadline = time.monotonic() + 10  # an answer comes a moment before the thread that made it waits again
            while gone() is not None and time.monotonic() < deadline:
                gc.collect()
                time.sleep(0.01)
            assert gone() is None


def test_an_answer_without_room_in_memory_fails_alone(model, monkeypatch):
    with spindle.Engine(model, scheduler=SchedulerConfig(token_budget=16)) as engine:
        adapter, other = (engine.create_adapter(rank=4, seed=1) for _ in range(2))
        before = engine.resident(adapter.model_id).adapter.params.clone()

        def no_room(lengths, widths):
            raise MemoryError("no room")

        with monkeypatch.context() as patch:
            patch.setattr(codec, "Answer", no_room)
            future = engine.submit(body(adapter.model_id, 1, [datum(16, seed=i) for i in range(3)]))
            with pytest.raises(ServerError, match="MemoryError while running seq_id 1"):
                future.result(60)
        adapter._seq_id = 1
        assert adapter.optim_step().result(60).metrics["grad_norm"] == 0.0
        assert torch.equal(engine.resident(adapter.model_id).adapter.params, before)
        assert other.forward([datum(4)]).result(60).loss == adapter.forward([datum(4)]).result(60).loss
        assert engine.stats()["queue"]["queued_requests"] == 0


def test_optimizer_settings_of_the_wrong_type_fail_alone(engine):
    adapter, other = engine.create_adapter(rank=4, seed=1), engine.create_adapter(rank=4, seed=1)
    with pytest.raises(InvalidRequest, match="optim_step: got dict for an adapter created with the adamw optimizer"):
        adapter.optim_step({"learning_rate": 1e-3}).result(30)
    assert adapter.forward([datum(4)]).result(30).loss == other.forward([datum(4)]).result(30).loss


def test_a_flood_of_samples_does_not_hold_up_training(engine):
    adapter = engine.create_adapter(rank=4, seed=1)
    samples = [engine.sample(None, [3, 4, 5], spindle.SamplingParams(max_tokens=400)) for _ in range(300)]
    adapter.forward_backward([datum(8)]).result(30)
    assert not any(sample.done() for sample in samples)
    for sample in samples:
        sample.cancel()


def test_failed_requests_keep_nothing_of_themselves(engine):
    adapter = engine.create_adapter(rank=4, seed=1)
    bodies = [body(adapter.model_id, seq, [datum(40, weights=np.ones(3, np.float32))]) for seq in range(1, 101)]
    futures = [engine.submit(one) for one in bodies]
    for future in futures:
        error = future.exception(30)
        assert isinstance(error, InvalidRequest)
        assert error.__traceback__ is None and (error.__context__ is None or error.__context__.__traceback__ is None)
    assert len(engine.scheduler._queues[adapter.model_id]._first) <= 17


def test_a_callback_of_a_given_up_request_may_submit_the_next(model):
    with spindle.Engine(model, scheduler=SchedulerConfig(gap_timeout_s=0.05)) as engine:
        adapter = engine.create_adapter(rank=4, seed=1)
        following = []
        done = threading.Event()

        def resubmit(_):
            following.append(engine.submit(body(adapter.model_id, 4, [datum(4)])))
            done.set()

        engine.submit(body(adapter.model_id, 3, [datum(4)])).add_done_callback(resubmit)
        assert done.wait(30)
        assert len(following[0].result(30)) > 0


def test_after_close_the_errors_of_submit_still_come_through_the_future(model):
    engine = spindle.Engine(model)
    adapter = engine.create_adapter(rank=4, seed=1)
    bad = body(adapter.model_id, 1, [datum(4, weights=np.ones(3, np.float32))])
    engine.scheduler.close()
    with pytest.raises(EngineClosed):
        engine.submit(bad).result(30)
    engine.close()


@pytest.mark.parametrize("seed", [1 << 64, -(1 << 63) - 1, 1.5, "x"])
def test_seeds_that_no_generator_takes_are_refused(engine, seed):
    with pytest.raises(UserError, match=r"seed: got .*; allowed is a whole number of 64 bits"):
        engine.create_adapter(rank=4, seed=seed)


def custom(metric=None, *, forget=False):
    """The id of a custom loss, the sum of the logprobs, with one metric."""
    nodes = [
        {"op": "placeholder", "name": "p", "target": "logprobs"},
        {"op": "call_method", "name": "s", "target": "sum", "args": [{"ref": "p"}]},
        {"op": "call_function", "name": "h", "target": "torch.heaviside", "args": [{"ref": "p"}, {"ref": "p"}]},
        {"op": "call_method", "name": "t", "target": "sum", "args": [{"ref": "h"}]},
        {"op": "output", "name": "out", "target": "output"},
    ]
    metrics = {"dict": {} if metric is None else {"custom/x:sum": metric}}
    nodes[-1]["args"] = [[{"ref": "s" if metric is not None or forget else "t"}, metrics]]
    return losses.create_custom("x", [{"name": "logprobs", "rank": 1}], {"format": 1, "nodes": nodes}, "me")


@pytest.mark.parametrize(
    ("metric", "text"),
    [
        ({"ref": "p"}, "custom loss: "),
        ("abc", "could not convert string to float"),
        (None, "derivative for aten::heaviside is not implemented"),
    ],
)
def test_a_custom_loss_that_breaks_fails_alone(engine, metric, text):
    own, other, before = (engine.create_adapter(rank=4, seed=1) for _ in range(3))
    held = before.forward_backward([datum(300)])  # so that the next two share a micro-batch
    broken = own.forward_backward([datum(6)], "custom", {"loss_id": custom(metric)})
    fine = other.forward_backward([datum(6)])
    with pytest.raises(InvalidRequest, match=text):
        broken.result(30)
    assert fine.result(30).loss > 0 and held.result(30).loss > 0
    assert own.optim_step().result(30).metrics["grad_norm"] == 0


def test_a_custom_loss_that_is_forgotten_while_its_request_waits_still_runs(engine):
    from spindle.losses import custom as registry

    adapter, before = engine.create_adapter(rank=4, seed=1), engine.create_adapter(rank=4)
    held = [before.forward_backward([datum(300)]) for _ in range(4)]
    waiting = adapter.forward_backward([datum(6)], "custom", {"loss_id": custom(forget=True)})
    registry._losses._owner_of.clear()
    assert waiting.result(30).loss < 0 and held[0].result(30).loss > 0


def test_activations_past_their_budget_are_computed_again_with_the_same_bits(model):
    grads = []
    for budget in (None, 0):
        with spindle.Engine(model, activation_bytes=budget) as engine:
            adapter = engine.create_adapter(rank=4, seed=1)
            adapter.forward_backward([datum(20), datum(9, seed=2)]).result(60)
            grads.append(engine.resident(adapter.model_id).adapter.grads.clone())
    assert torch.equal(*grads)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(("thread", "prefetch"), [("spindle-device", False), ("spindle-device", True), ("spindle-feed", True)])
def test_a_thread_that_stops_on_an_error_that_nothing_foresees_leaves_nobody_waiting(model, monkeypatch, thread, prefetch):
    """What ran fails too, and the other thread of the device ends."""
    before = set(threading.enumerate())
    with spindle.Engine(model, devices=["cpu"], prefetch=prefetch, scheduler=SchedulerConfig(token_budget=8)) as engine:
        adapters = [engine.create_adapter(rank=1, seed=1) for _ in range(2)]
        executor = engine._loops[0].executor
        gate, (method, real) = threading.Event(), ("run", executor.run) if thread == "spindle-device" else ("fill", executor.fill)

        def broken(job):
            gate.wait(30)
            if threading.current_thread().name.startswith(thread):
                raise RuntimeError("nobody foresaw this")
            return real(job)

        monkeypatch.setattr(executor, method, broken)
        futures = [adapter.forward_backward([datum(6)] * 4) for adapter in adapters * 3]
        gate.set()
        errors = [future.exception(30) for future in futures]
        assert any(isinstance(error, ServerError) for error in errors)
        assert all(isinstance(error, ServerError | EngineClosed) for error in errors if error is not None)
        with pytest.raises(EngineClosed):
            adapters[0].forward([datum(3)])
        engine.close(30)
        assert not [one.name for one in threading.enumerate() if one.name.startswith("spindle") and one not in before]
