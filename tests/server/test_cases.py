"""Faults seen in other servers, over the wire: each small input and its right answer. The numbers are those of the list of cases."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
import zstandard

from spindle import codec
from spindle.codec import wire_pb2
from spindle.compute.model import BaseModel
from spindle.engine import Engine
from spindle.server import running
from spindle.types import Datum, TensorData
from tests.server.wire import NAME, PROTOBUF, Wire, datum, tokens_of
from tests.tiny import VOCAB, tiny_llama


def logprobs(output):
    return [item["logprobs"] for item in output.loss_fn_outputs]


def test_1_requests_that_arrive_backwards_run_in_order(wire):
    ordered, shuffled = wire.model(), wire.model()
    requests = [
        lambda model: wire.train(model, 1, [datum(6)]),
        lambda model: wire.step(model, 2, learning_rate=0.1),
        lambda model: wire.train(model, 3, [datum(6)], forward_only=True),
    ]
    expected = [request(ordered) for request in requests][-1]
    arrived, *_ = [request(shuffled) for request in reversed(requests)]
    assert np.array_equal(logprobs(wire.result(arrived))[0], logprobs(wire.result(expected))[0])


def test_2_steps_sent_without_waiting_equal_steps_awaited(wire):
    waited, piped = wire.model(), wire.model()
    for seq_id in (1, 3):
        wire.result(wire.train(waited, seq_id, [datum(6, seq_id)]))
        wire.result(wire.step(waited, seq_id + 1, learning_rate=0.01))
    for seq_id in (1, 3):
        wire.train(piped, seq_id, [datum(6, seq_id)])
        wire.step(piped, seq_id + 1, learning_rate=0.01)
    answers = [wire.result(wire.train(model, 5, [datum(9)], forward_only=True)) for model in (waited, piped)]
    assert np.array_equal(logprobs(answers[0])[0], logprobs(answers[1])[0])


def test_3_the_gradient_does_not_depend_on_how_datums_are_split(wire):
    data = [datum(length, length) for length in (7, 2, 5, 3)]
    norms = []
    for split in ([data], [data[:2], data[2:]], [[one] for one in data]):
        model = wire.model()
        for seq_id, part in enumerate(split, 1):
            wire.train(model, seq_id, part)
        norms.append(wire.grad_norm(model, len(split) + 1))
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-5)


def ratio_datum(length: int = 6, advantages: float = 1.0):
    inputs = {"logprobs": np.full(length, -5, np.float32), "advantages": np.full(length, advantages, np.float32)}
    one = datum(length, **inputs)
    return Datum(one.tokens, {name: value for name, value in one.loss_fn_inputs.items() if name != "weights"})


def test_4_zero_advantages_have_no_gradient(wire):
    model = wire.model()
    assert wire.result(wire.train(model, 1, [ratio_datum(advantages=0.0)], "importance_sampling")).loss == 0
    assert wire.grad_norm(model, 2) == 0


def test_5_each_queued_request_keeps_its_own_config(wire):
    bounds = [(0.1, 0.2), (0.8, 1.2), (5.0, 9.0)]
    model = wire.model()
    acks = [
        wire.train(
            model,
            seq_id,
            [ratio_datum()],
            "ppo",
            loss_fn_config={"clip_low_threshold": low, "clip_high_threshold": high},
            forward_only=True,
        )
        for seq_id, (low, high) in reversed(list(enumerate(bounds, 1)))
    ]
    for ack, (low, high) in zip(acks, reversed(bounds), strict=True):
        output = wire.result(ack)
        ratio = np.exp(logprobs(output)[0] + 5)
        assert output.loss == pytest.approx(-np.minimum(ratio, np.clip(ratio, low, high)).sum(), rel=1e-4)


def test_6_the_loss_is_a_plain_sum(wire):
    model = wire.model()

    def norm(first_seq, *data):
        wire.train(model, first_seq, list(data))
        return wire.grad_norm(model, first_seq + 1)

    one = norm(1, datum(6))
    assert norm(3, datum(6, weights=np.full(6, 10, np.float32))) == pytest.approx(10 * one, rel=1e-5)
    assert norm(5, datum(6), datum(6)) == pytest.approx(2 * one, rel=1e-5)
    assert norm(7, datum(6), datum(6, weights=np.full(6, -1, np.float32))) == pytest.approx(0, abs=1e-5 * one)


def test_7_a_datum_of_zero_weight_changes_nothing(wire):
    with_zero, without = wire.model(), wire.model()
    wire.train(with_zero, 1, [datum(6)])
    wire.train(with_zero, 2, [datum(5, 3, weights=np.zeros(5, np.float32))])
    wire.train(without, 1, [datum(6)])
    assert wire.grad_norm(with_zero, 3) == pytest.approx(wire.grad_norm(without, 2), rel=1e-6)


def test_8_weight_decay_works_without_a_gradient(wire, engine):
    model = wire.model()
    before = engine.resident(model).adapter.params.clone()
    wire.result(wire.step(model, 1, weight_decay=0.1, learning_rate=0.1))
    assert np.allclose(engine.resident(model).adapter.params, before * 0.99, rtol=1e-6, atol=0)


def test_9_a_step_with_nothing_accumulated_answers_at_once(wire):
    metrics = wire.result(wire.step(wire.model(), 1, grad_clip_norm=1.0))["metrics"]
    assert metrics["grad_norm"] == 0


def test_10_dense_and_sparse_targets_mean_the_same(wire):
    rng = np.random.default_rng(0)
    targets, weights = np.zeros((5, 3), np.int64), np.zeros((5, 3), np.float32)
    targets[2], weights[2] = rng.integers(2, VOCAB, 3), [0.5, 1.0, 2.0]
    crow, col = np.array([0, 0, 0, 3, 3, 3]), np.arange(3)
    tokens = rng.integers(2, VOCAB, 5)
    dense = Datum(tokens, {"target_tokens": targets, "weights": weights})
    sparse = Datum(
        tokens,
        {"target_tokens": TensorData(targets[2], (5, 3), crow, col), "weights": TensorData(weights[2], (5, 3), crow, col)},
    )
    model = wire.model()
    answers = [wire.result(wire.train(model, seq_id, [one])) for seq_id, one in ((1, dense), (2, sparse))]
    for answer in answers:
        assert logprobs(answer)[0].shape == (5, 3)
        assert answer.loss == pytest.approx(-(weights[2] * logprobs(answer)[0][2]).sum(), rel=1e-5)
    assert np.array_equal(logprobs(answers[0])[0], logprobs(answers[1])[0])


def test_11_a_position_may_have_many_candidate_targets(wire):
    rng = np.random.default_rng(0)
    one = Datum(rng.integers(2, VOCAB, 4), {"target_tokens": rng.integers(2, VOCAB, (4, 21)), "weights": np.ones((4, 21), np.float32)})
    assert logprobs(wire.result(wire.train(wire.model(), 1, [one])))[0].shape == (4, 21)


def test_12_results_come_in_input_order(wire):
    model = wire.model()
    data = [datum(length, length) for length in (7, 2, 5, 3)]
    together = logprobs(wire.result(wire.train(model, 1, data, forward_only=True)))
    assert [len(item) for item in together] == [7, 2, 5, 3]
    for seq_id, (one, expected) in enumerate(zip(data, together, strict=True), 2):
        alone = logprobs(wire.result(wire.train(model, seq_id, [one], forward_only=True)))[0]
        assert np.allclose(alone, expected, atol=1e-5)


@pytest.mark.parametrize("what", ["random bytes", "empty", "truncated zstd", "bytes after the frame", "not zstd"])
def test_13_a_malformed_body_is_a_400_that_says_what_is_wrong(wire, what):
    model = wire.model()
    good = codec.encode_request(model, 1, [datum(6)], "cross_entropy")
    frame = zstandard.compress(good)
    body, zstd = {
        "random bytes": (np.random.default_rng(0).bytes(500), False),
        "empty": (b"", False),
        "truncated zstd": (frame[:-5], True),
        "bytes after the frame": (frame + b"junk", True),
        "not zstd": (good, True),
    }[what]
    response = wire.send(wire.training_request(body, zstd))
    assert response.status_code == 400
    assert response.json()["category"] == "user" and response.json()["error"]
    assert wire.result(wire.train(model, 1, [datum(6)])).loss > 0  # the connection and the order are as they were


@pytest.mark.parametrize(
    ("inputs", "told"),
    [
        ({"target_tokens": None}, ["target_tokens"]),
        ({"weights": np.ones(5, np.float32)}, ["weights", "5", "6"]),
        ({"target_tokens": np.ones(6, np.float32)}, ["target_tokens"]),
        ({"weights": np.array([1, 2, np.nan, 1, 1, 1], np.float32)}, ["weights"]),
        ({"surprise": np.ones(6, np.float32)}, ["surprise"]),
    ],
)
def test_14_bad_inputs_are_named_and_the_next_request_runs(wire, inputs, told):
    model = wire.model()
    bad = datum(6, **inputs)
    bad = Datum(bad.tokens, {name: value for name, value in bad.loss_fn_inputs.items() if value is not None})
    text = wire.failure(wire.train(model, 1, [datum(4), bad]))
    for word in [*told, "1"]:
        assert word in text
    assert wire.result(wire.train(model, 2, [datum(6)])).loss > 0


def test_15_an_unknown_config_key_is_a_user_error(wire):
    model = wire.model()
    assert "surprise" in wire.failure(wire.train(model, 1, [datum(4)], loss_fn_config={"surprise": 1.0}))


def test_16_a_load_without_the_optimizer_field_takes_weights_only(wire, engine):
    model = wire.model()
    wire.train(model, 1, [datum(6)])
    wire.step(model, 2, learning_rate=0.01)
    path = wire.result(wire.ok("save_weights", model_id=model, seq_id=3, path="x"))["path"]
    other = wire.model()
    wire.result(wire.ok("load_weights", model_id=other, seq_id=1, path=path))
    assert np.array_equal(engine.resident(other).adapter.params, engine.resident(model).adapter.params)
    assert engine.resident(other).adapter.step == 0
    assert not engine.resident(other).adapter.exp_avg.any()
    wire.result(wire.ok("load_weights", model_id=other, seq_id=2, path=path, optimizer=True))
    assert engine.resident(other).adapter.step == 1
    assert np.array_equal(engine.resident(other).adapter.exp_avg_sq, engine.resident(model).adapter.exp_avg_sq)


def test_17_a_sampler_path_is_refused_for_training_by_its_kind(wire):
    model = wire.model()
    path = wire.result(wire.ok("save_weights_for_sampler", model_id=model, seq_id=1, path="x"))["path"]
    text = wire.failure(wire.ok("load_weights", model_id=model, seq_id=2, path=path))
    assert "is of kind sampler_weights, which has no state to train on" in text
    refused = wire.refused("load_weights", session_id=wire.session_id, model_seq_id=77, path=path, optimizer=False)
    assert "is of kind sampler_weights" in refused


def test_18_a_state_and_sampler_weights_of_one_name_are_two_checkpoints(wire):
    model = wire.model()
    paths = [
        wire.result(wire.ok("save_weights", model_id=model, seq_id=1, path="0000"))["path"],
        wire.result(wire.ok("save_weights_for_sampler", model_id=model, seq_id=2, path="0000"))["path"],
    ]
    listed = wire.get(f"/training_runs/{model}/checkpoints").json()["checkpoints"]
    assert sorted(item["tinker_path"] for item in listed) == sorted(paths)
    assert len(set(paths)) == 2


def test_19_the_same_save_twice_is_one_save(wire):
    model = wire.model()
    body = {"model_id": model, "seq_id": 1, "path": "x"}
    first, second = wire.ok("save_weights", **body), wire.ok("save_weights", **body)
    assert first == second
    assert wire.result(second)["path"] == f"tinker://{model}/weights/x"
    assert wire.ok("save_weights", **body) == first
    assert "a repeat must have the same content" in wire.refused("save_weights", **(body | {"path": "y"}))
    assert len(wire.get(f"/training_runs/{model}/checkpoints").json()["checkpoints"]) == 1


def test_20_greedy_samples_are_all_equal(wire):
    response = wire.sampled(wire.sample([5, 6, 7], num_samples=8, sampling_params={"max_tokens": 6, "temperature": 0.0}))
    assert len(tokens_of(response)) == 8
    assert len({tuple(tokens) for tokens in tokens_of(response)}) == 1


def test_21_a_request_over_the_context_names_both_numbers(wire):
    text = wire.post(
        "/asample",
        json={
            "prompt": {"chunks": [{"tokens": [5] * 100, "type": "encoded_text"}]},
            "sampling_params": {"max_tokens": 1000},
            "base_model": "spindle/tiny",
        },
    )
    assert text.status_code == 400
    assert "100" in text.json()["error"] and "1000" in text.json()["error"] and "512" in text.json()["error"]


def test_22_an_unknown_sampling_field_is_a_user_error(wire):
    body = {"prompt": {"chunks": [{"tokens": [5]}]}, "base_model": "spindle/tiny", "sampling_params": {"max_tokens": 1, "min_p": 0.1}}
    assert "min_p" in wire.refused("asample", **body)
    assert "surprise" in wire.refused("asample", **(body | {"sampling_params": {"max_tokens": 1}, "surprise": 1}))


def test_23_every_sample_has_its_id_at_once(wire):
    ack = wire.sample([5, 6, 7], num_samples=3)
    assert len(set(ack["sample_sequence_ids"])) == 3
    assert len(wire.sampled(ack).sequences) == 3


@pytest.mark.parametrize("token", [VOCAB, -1, 2**31, 2**40])
def test_24_a_token_outside_the_vocabulary_is_a_user_error(wire, token):
    body = {"prompt": {"chunks": [{"tokens": [5, token]}]}, "base_model": "spindle/tiny", "sampling_params": {"max_tokens": 1}}
    assert str(token) in wire.refused("asample", **body)


@pytest.mark.parametrize("token", [VOCAB, -1])
@pytest.mark.parametrize("where", ["tokens", "target_tokens"])
def test_24_in_training_too(wire, token, where):
    model = wire.model()
    good = datum(6)
    bad = np.array([5, 6, token, 7, 8, 9])
    one = Datum(bad, good.loss_fn_inputs) if where == "tokens" else datum(6, target_tokens=bad)
    text = wire.failure(wire.train(model, 1, [one]))
    assert f"is {token}: token ids are 0 to {VOCAB - 1}" in text


def test_25_requests_behind_a_gap_wait_and_then_all_run(wire):
    model = wire.model()
    acks = [wire.train(model, seq_id, [datum(3, seq_id)], forward_only=True) for seq_id in range(2, 102)]
    wire.train(model, 1, [datum(3)])
    assert all(wire.result(ack).loss > 0 for ack in acks)


def test_25_each_body_is_decoded_once_however_long_the_queue(wire, engine, monkeypatch):
    """300 requests behind a gap: one scan each when it comes, nothing while it waits, one fill each when it runs."""
    scans, fills = [], []
    scan, fill = codec.scan, codec.fill
    monkeypatch.setattr(codec, "scan", lambda *args, **options: scans.append(1) or scan(*args, **options))
    monkeypatch.setattr(codec, "fill", lambda *args, **options: fills.append(len(args)) or fill(*args, **options))
    model = wire.model()
    acks = []
    costs = []
    for seq_id in range(2, 302):
        before = time.thread_time()  # of the client: its own work, to be taken off
        process = time.process_time()
        acks.append(wire.train(model, seq_id, [datum(3, seq_id)], forward_only=True))
        costs.append(time.process_time() - process - (time.thread_time() - before))
    assert len(scans) == 300 and not fills
    first, last = np.median(costs[:100]), np.median(costs[200:])  # seconds of this process per request, among them the server's
    assert last < 2 * first + 0.001, (first, last)
    before = time.process_time()
    time.sleep(1)
    assert time.process_time() - before < 0.5  # waiting costs nothing that grows with the queue
    assert len(scans) == 300 and not fills
    wire.train(model, 1, [datum(3)])
    assert all(wire.result(ack).loss > 0 for ack in acks)
    assert len(scans) == 301 and 0 < len(fills) <= 301


def test_26_train_mlp_false_leaves_no_mlp_in_the_adapter_or_its_export(wire, engine):
    model = wire.model(train_mlp=False)
    names = [slot.name for slot in engine.resident(model).adapter.layout.slots]
    assert names and not any("mlp" in name for name in names)
    path = wire.result(wire.ok("save_weights", model_id=model, seq_id=1, path="x"))["path"]
    info = wire.ok("weights_info", tinker_path=path)
    assert (info["train_mlp"], info["train_attn"], info["train_unembed"], info["lora_rank"]) == (False, True, True, 4)


def test_27_the_same_seed_gives_the_same_first_gradient(wire):
    norms = []
    for seed in (7, 7, 8):
        model = wire.model(seed=seed)
        wire.train(model, 1, [datum(6)])
        norms.append(wire.grad_norm(model, 2))
    assert norms[0] == norms[1] != norms[2]


def test_28_nothing_to_do_is_a_user_error(wire):
    assert "data" in wire.failure(wire.train(wire.model(), 1, []))
    body = {"prompt": {"chunks": [{"tokens": [5]}]}, "base_model": "spindle/tiny", "sampling_params": {"max_tokens": 1}}
    assert "num_samples" in wire.refused("asample", **body, num_samples=0)


def test_29_rope_scaling_is_not_ignored(tmp_path):
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    reference = tiny_llama(rope_parameters=scaling | {"rope_theta": 10_000.0})
    tokens = np.random.default_rng(0).integers(2, VOCAB, 200)
    with torch.no_grad():
        logits = reference(torch.tensor(tokens[:-1])[None]).logits[0]
    expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].numpy()
    with Engine(BaseModel.load(reference)) as engine, running(engine, store=tmp_path, name=NAME) as url:
        wire = Wire(url)
        one = Datum(tokens[:-1], {"target_tokens": tokens[1:], "weights": np.ones(199, np.float32)})
        ours = logprobs(wire.result(wire.train(wire.model(), 1, [one], forward_only=True)))[0]
    assert np.abs(ours - expected).max() <= 2e-5
    assert np.abs(expected - plain_logprobs(tokens)).max() > 0.1  # the scaling matters at these lengths


def plain_logprobs(tokens):
    with torch.no_grad():
        logits = tiny_llama()(torch.tensor(tokens[:-1])[None]).logits[0]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].numpy()


def test_30_one_bad_request_among_six_fails_alone(wire):
    models = [wire.model() for _ in range(6)]
    bad = datum(6, weights=np.ones(3, np.float32))
    acks = [wire.train(model, 1, [bad if index == 2 else datum(6)]) for index, model in enumerate(models)]
    for index, ack in enumerate(acks):
        if index == 2:
            assert "weights" in wire.failure(ack)
        else:
            assert wire.result(ack).loss > 0


def test_a_zstd_body_is_read_like_a_plain_one(wire):
    model = wire.model()
    answers = [wire.result(wire.train(model, seq_id, [datum(6)], zstd=zstd)) for seq_id, zstd in ((1, False), (2, True))]
    assert answers[0].loss == answers[1].loss


def test_answers_are_protobuf_where_asked_for_and_json_elsewhere(wire):
    ack = wire.train(wire.model(), 1, [datum(6)])
    proto, json = wire.raw(ack["request_id"]), wire.raw(ack["request_id"], proto=False)
    assert proto.headers["content-type"] == PROTOBUF
    expected = codec.decode_forward_backward(proto.content)
    assert json.json()["metrics"] == expected.metrics
    assert json.json()["loss_fn_outputs"][0]["logprobs"]["shape"] == [6]
    assert json.json()["loss_fn_outputs"][0]["logprobs"]["data"] == logprobs(expected)[0].tolist()
    sample = wire.sample([5, 6], sampling_params={"max_tokens": 3, "temperature": 0.0})
    message = wire_pb2.SampleResponse.FromString(wire.raw(sample["request_id"]).content)
    assert wire.raw(sample["request_id"], proto=False).json()["sequences"][0]["tokens"] == tokens_of(message)[0]
