"""What a ScannedRequest promises: fingerprint, release, memory that is reused, threads."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest

from spindle import codec
from spindle.codec import wire_pb2 as wire
from spindle.errors import InvalidRequest
from spindle.types import Datum, TensorData
from tests.codec.bodies import body, csr, datum, dense, fill_all, request, simple, text_datum, zstd


def fingerprint(*data: wire.Datum, **fields) -> bytes:
    return codec.scan(body(*data, **fields)).fingerprint


def test_fingerprint_does_not_depend_on_map_order():
    def written(names):
        head = request(loss_fn="ppo").SerializeToString()
        maps = {"weights": dense([1.0, 2.0]), "target_tokens": dense([3, 4]), "advantages": dense([0.0, 1.0])}
        inputs = b"".join(text_datum([], **{name: maps[name]}).SerializeToString() for name in names)
        inputs = inputs.replace(text_datum([]).SerializeToString(), b"")
        chunk = text_datum([1, 2]).SerializeToString()
        one = wire.Datum.FromString(chunk + inputs)
        assert len(one.loss_fn_inputs) == 3
        config = [request(model_id="", seq_id=0, loss_fn="", loss_fn_config={key: 1.0}).SerializeToString() for key in sorted(names)]
        raw = chunk + inputs
        return head + b"\x1a" + bytes([len(raw)]) + raw + b"".join(config if names[0] == "weights" else config[::-1])

    forward = written(["weights", "target_tokens", "advantages"])
    backward = written(["advantages", "target_tokens", "weights"])
    assert forward != backward and codec.scan(forward).fingerprint == codec.scan(backward).fingerprint
    assert codec.scan(zstd(forward), "zstd").fingerprint == codec.scan(backward).fingerprint
    assert len(codec.scan(forward).fingerprint) == 16


def test_fingerprint_tells_contents_apart():
    base = simple(300)
    wide = np.zeros((2, 2), int)
    wide[0, 1] = 5
    variants = [
        fingerprint(base),
        fingerprint(base, base),
        fingerprint(simple(299)),
        fingerprint(base, seq_id=4),
        fingerprint(base, model_id="other"),
        fingerprint(base, loss_fn="ppo"),
        fingerprint(base, forward_only=True),
        fingerprint(base, loss_fn_config={"a": 1.0}),
        fingerprint(base, loss_fn_config={"a": 2.0}),
        fingerprint(base, loss_fn_config={"b": 1.0}),
        fingerprint(simple(300, weights=dense(np.ones(300)[::-1] * 2.0))),
        fingerprint(simple(300, weights=dense(np.arange(300.0)))),
        fingerprint(simple(300, weights=dense(np.arange(300.0)[::-1]))),
        fingerprint(simple(300, weights=dense(np.arange(300)))),
        fingerprint(simple(300, advantages=dense(np.ones(300)))),
        fingerprint(text_datum([1, 2], target_tokens=dense(wide))),
        fingerprint(text_datum([1, 2], target_tokens=csr(wide))),
        fingerprint(text_datum([2, 1], target_tokens=csr(wide))),
        fingerprint(text_datum([1, 2], target_tokens=csr(wide.T))),
        fingerprint(simple(2), simple(3)),
        fingerprint(simple(3), simple(2)),
    ]
    assert len(set(variants)) == len(variants)


def test_every_bit_of_a_tensor_counts():
    values = np.arange(200, dtype=np.int64)
    seen = set()
    for i in range(200):
        for bit in (0, 1, 17, 30):
            changed = values.copy()
            changed[i] ^= 1 << bit
            seen.add(fingerprint(simple(200, target_tokens=dense(changed))))
    assert len(seen) == 800


def test_release():
    scanned = codec.scan(body(simple(3)))
    assert not scanned.released
    scanned.release()
    scanned.release()
    assert scanned.released
    assert (scanned.model_id, scanned.num_tokens, scanned.lengths.tolist(), len(scanned.fingerprint)) == ("run:train:0", 3, [3], 16)
    for use in (lambda: fill_all(scanned), lambda: scanned.input_names, lambda: scanned.spans(0), lambda: scanned.input_widths("weights")):
        with pytest.raises(RuntimeError, match="the request was released: its tensors are gone"):
            use()


def test_plain_body_is_looked_into_not_copied():
    raw = bytearray(body(text_datum([1, 2], target_tokens=dense([3, 4]))))
    scanned = codec.scan(raw)
    with pytest.raises(BufferError):  # it is held...
        raw.append(0)
    at = raw.index(np.array([3, 4], "<i8").tobytes())
    raw[at] = 9  # ... and what changes in it is seen
    assert fill_all(scanned)["targets"].tolist() == [9, 4]
    scanned.release()
    raw.append(0)


def test_spans_bounds():
    with pytest.raises(IndexError, match="datum 1 of 1"):
        codec.scan(body(simple())).spans(1)


def test_steady_state_allocates_nothing_and_the_pool_is_bounded():
    packed = zstd(body(*[simple(2000) for _ in range(50)]))
    gc.collect()

    def serve(n, at_once=1):
        for _ in range(n):
            held = [codec.scan(packed, "zstd") for _ in range(at_once)]
            for scanned in held:
                fill_all(scanned, ["weights"])
                scanned.release()

    serve(3)
    before = codec.pool_stats()
    serve(50)
    after = codec.pool_stats()
    assert after["allocated_bytes"] == before["allocated_bytes"]
    serve(1, at_once=40)
    stats = codec.pool_stats()
    assert stats["idle"] <= stats["max_idle"] and stats["idle_bytes"] <= stats["max_idle_bytes"]


def test_failed_scans_give_their_memory_back():
    good, bad = zstd(body(simple(2000))), zstd(body(simple(2000), text_datum([-1])))
    for _ in range(3):
        codec.scan(good, "zstd").release()
    before = codec.pool_stats()
    for _ in range(20):
        with pytest.raises(InvalidRequest):
            codec.scan(bad, "zstd")
    after = codec.pool_stats()
    assert (after["allocated_bytes"], after["idle"]) == (before["allocated_bytes"], before["idle"])


def test_threads_get_the_answers_of_one():
    bodies = [zstd(body(*[simple(100 * (i + 1)) for _ in range(5)], seq_id=i + 1)) for i in range(8)]
    expected = [(scanned.fingerprint, fill_all(scanned, ["weights"])) for scanned in (codec.scan(packed, "zstd") for packed in bodies)]
    wrong: list[str] = []

    def work(turn: int) -> None:
        for i in range(60):
            which = (turn + i) % 8
            scanned = codec.scan(bodies[which], "zstd")
            got = fill_all(scanned, ["weights"])
            if scanned.fingerprint != expected[which][0] or any((got[key] != value).any() for key, value in expected[which][1].items()):
                wrong.append(f"thread {turn}, body {which}")
            scanned.release()

    threads = [threading.Thread(target=work, args=(turn,)) for turn in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_release_while_another_thread_fills():
    packed = zstd(body(*[simple(3000) for _ in range(20)]))
    for _ in range(20):
        scanned = codec.scan(packed, "zstd")
        got: list = []

        def work(scanned=scanned, got=got) -> None:
            try:
                got.append(fill_all(scanned, ["weights"]))
            except RuntimeError:
                got.append(None)

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        scanned.release()
        for thread in threads:
            thread.join()
        for result in got:
            assert result is None or (result["tokens"].reshape(20, 3000) == np.arange(1, 3001)).all()


def test_in_process_errors_name_datum_and_input():
    def scan(*data: Datum, config=None):
        return codec.scan_arrays("m", 2, data, "cross_entropy", config, limits=codec.Limits(vocab_size=50))

    bad = {
        "datum 0: model_input has no tokens: at least one is needed": Datum([]),
        "datum 0: model_input has shape [1, 2] and dtype int64: one row of integers is needed": Datum([[1, 2]]),
        "datum 0: model_input has shape [2] and dtype float32: one row of integers is needed": Datum([1.0, 2.0]),
        "datum 0: model_input: token 0 is 50: token ids are 0 to 49": Datum(np.array([50], np.int64)),
        "datum 0: model_input: token 1 is 4294967297: token ids are 0 to 49": Datum(np.array([1, (1 << 32) + 1])),
        "datum 0: weights has dtype <U1: numbers are needed": datum(weights=["a"] * 4),
        "datum 0: weights is not an array: ": datum(weights=[[1], [2, 3]]),
        "datum 0: weights: value 0 is inf: it must be finite": datum(weights=np.array([1e300, 0, 0, 0])),
        "datum 0: target_tokens has dtype float32: int64 or int32 is needed": datum(target_tokens=np.ones(4)),
        "datum 0: weights has only one of crow_indices and col_indices: CSR needs both": datum(
            weights=TensorData(np.ones(1), (4, 1), np.array([0, 1, 1, 1, 1]))
        ),
        "datum 0: weights is CSR without a shape: give [N, K]": datum(
            weights=TensorData(np.ones(1), None, np.array([0, 1, 1, 1, 1]), np.array([0]))
        ),
    }
    for text, one in bad.items():
        with pytest.raises(InvalidRequest) as error:
            scan(one)
        assert text in str(error.value) and (error.value.model_id, error.value.seq_id) == ("m", 2)
    with pytest.raises(InvalidRequest, match="loss_fn_config: "):
        scan(datum(), config={"a": [1]})


def test_in_process_arrays_are_not_copied():
    tokens, targets, weights = np.arange(3), np.arange(3), np.ones(3, np.float32)
    scanned = codec.scan_arrays("m", 1, [Datum(tokens, {"target_tokens": targets, "weights": weights})], "cross_entropy")
    assert scanned.nbytes == 24 + 24 + 12
    tokens[0], targets[1], weights[2] = 7, 8, 9
    del tokens, targets, weights
    gc.collect()
    got = fill_all(scanned, ["weights"])
    assert (got["tokens"].tolist(), got["targets"].tolist(), got["weights"].tolist()) == ([7, 1, 2], [0, 8, 2], [1, 1, 9])


def test_in_process_number_types():
    data = [
        Datum(np.array([1, 2], np.uint8), {"target_tokens": np.array([3, 4], np.int16), "weights": np.array([0.5, 2], np.float64)}),
        Datum((1,), {"target_tokens": np.array([5], np.int32), "weights": np.array([True])}),
    ]
    got = fill_all(codec.scan_arrays("m", 1, data, "cross_entropy"), ["weights"])
    assert (got["tokens"].tolist(), got["targets"].tolist(), got["weights"].tolist()) == ([1, 2, 1], [3, 4, 5], [0.5, 2, 1])
