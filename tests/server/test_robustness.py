"""What hostile, broken and unlucky clients send: always an answer that says what is wrong, never a 500, never a stuck server."""

from __future__ import annotations

import gc
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import msgspec
import numpy as np
import pytest
import tinker
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spindle import codec
from spindle.compute.adapter import AdapterWeights
from spindle.errors import InvalidRequest
from spindle.server import ServerSettings, bodies, old_json, ordered, routing, running, sampling
from spindle.server.app import NOUNS
from spindle.server.live_view import resident_bytes
from tests.server.wire import NAME, PROTOBUF, Wire, datum

SMALL = ServerSettings(max_body_bytes=100_000, max_json_bytes=20_000, body_idle_timeout_s=0.5, header_timeout_s=0.5, max_header_bytes=8_000)


@pytest.fixture(scope="module")
def strict(engine, tmp_path_factory):
    with running(engine, store=tmp_path_factory.mktemp("store"), name=NAME, settings=SMALL) as url:
        yield url


def connect(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=10)
    return connection


def head(length: int | str, path: str = "/api/v1/forward_backward", kind: str = PROTOBUF) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n\r\n".encode()


def answer(connection: socket.socket, timeout_s: float = 2) -> bytes:
    """Everything the server sends until it closes, has sent an object, or pauses."""
    connection.settimeout(timeout_s)
    received = b""
    try:
        while part := connection.recv(65536):
            received += part
            if b"\r\n\r\n" in received and received.endswith(b"}"):
                break
    except TimeoutError:
        pass
    return received


def test_a_body_that_stops_arriving_is_given_up(strict):
    with closing(connect(strict)) as connection:
        connection.sendall(head(1000) + b"x" * 10)
        received = answer(connection)
    assert b" 400 " in received and b"stopped arriving after 10 bytes: nothing came for 0.5 s" in received


def test_a_head_that_never_ends_is_cut_off(strict):
    with closing(connect(strict)) as connection:
        connection.sendall(b"POST /api/v1/forward_backward HTTP/1.1\r\nHost: x\r\nX-Slow: ")
        started = time.monotonic()
        assert connection.recv(100) == b""
        assert 0.2 < time.monotonic() - started < 3


def test_a_connection_that_says_nothing_is_closed(strict):
    with closing(connect(strict)) as connection:
        assert connection.recv(100) == b""


@pytest.mark.parametrize("what", [b"X-Long: " + b"y" * 50_000, b"".join(b"X-%d: y\r\n" % i for i in range(5_000))])
def test_long_heads_are_refused(strict, what):
    with closing(connect(strict)) as connection:
        try:
            connection.sendall(b"GET /api/v1/healthz HTTP/1.1\r\nHost: x\r\n" + what)
            received = answer(connection)
        except ConnectionError:
            return  # closed while we were still sending
    assert b" 400 " in received and b"have more than 8000 bytes" in received


def test_a_long_path_is_refused(strict):
    with closing(connect(strict)) as connection:
        connection.sendall(b"GET /api/v1/" + b"a" * 7_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b" 404 " in answer(connection)


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_over_the_limit_is_refused_with_the_limit(strict, declared):
    wire = Wire(strict)
    big = b"x" * 150_000
    content = big if declared else iter([big[:75_000], big[75_000:]])
    response = wire.post("/forward_backward", content=content, headers={"Content-Type": PROTOBUF})
    assert response.status_code == 400
    assert "at most 100000 are allowed" in response.json()["error"]
    assert wire.get("/healthz").json() == {"status": "ok"}


def test_aborted_uploads_and_junk_leave_the_server_well(strict):
    wire = Wire(strict)
    model = wire.model()
    for junk in (
        head(1000) + b"half",
        head(-5) + b"x",
        head("many") + b"x",
        head(3) + b"abcdefgh" * 100,
        b"\x16\x03\x01\x02\x00\x01\x00" * 50,
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /api/v1/asample HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\nhello\r\n",
        b"GET /api/v1/h\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
        (head(2, "/api/v1/telemetry", "application/json") + b"{}") * 50,
    ):
        with closing(connect(strict)) as connection:
            connection.sendall(junk)
    assert wire.result(wire.train(model, 1, [datum(4)])).loss > 0


def test_a_wrong_content_type_or_encoding_is_named(strict):
    wire = Wire(strict)
    response = wire.post("/forward_backward", content=b"x", headers={"Content-Type": "text/html"})
    assert response.status_code == 400 and "Content-Type is 'text/html', allowed: application/x-protobuf" in response.json()["error"]
    response = wire.post("/forward_backward", content=b"x", headers={"Content-Type": PROTOBUF, "Content-Encoding": "br"})
    assert response.status_code == 400 and "br" in response.json()["error"]


def test_bytes_that_are_not_json_are_a_400(strict):
    wire = Wire(strict)
    for content in (b"", b"{", b"\xff\xfe", b"[" * 15_000, b"null", b"[]", b'"text"', b'{"model_id": NaN}'):
        response = wire.post("/optim_step", content=content)
        assert response.status_code == 400, content[:20]
        assert response.json()["category"] == "user"


POSTS = sorted({route.path for noun in NOUNS for route in noun.routes if route.methods & {"POST", "PUT"}})
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3), max_leaves=6
)
FIELDS = [
    "model_id",
    "session_id",
    "seq_id",
    "model_seq_id",
    "path",
    "base_model",
    "lora_config",
    "optimizer_config",
    "adam_params",
    "optimizer_params",
    "user_metadata",
    "sampling_session_id",
    "sampling_session_seq_id",
    "prompt",
    "sampling_params",
    "num_samples",
    "request_id",
    "target",
    "prev_cursor",
    "ttl_seconds",
    "tinker_path",
    "source_path",
    "kind",
    "reason",
    "optimizer",
    "name",
    "inputs",
    "graph",
    "custom_loss_seq_id",
    "limit",
    "cursor",
    "statuses",
    "type",
    "forward_input",
    "data",
    "loss_fn",
]


@pytest.fixture(scope="module")
def fuzzed(strict):
    wire = Wire(strict)
    return wire, wire.model()


@given(
    path=st.sampled_from(POSTS),
    body=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=8),
    real=st.booleans(),
    seq_id=st.integers(100, 10_000),
)
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_json_body_makes_a_500(fuzzed, path, body, real, seq_id):
    wire, model = fuzzed
    if real:
        body |= {"model_id": model, "session_id": wire.session_id, "seq_id": seq_id}
    if "finish" in path or "unload" in path:
        body.pop("model_id", None)
    for name in ("run_id", "kind", "name", "session_id"):
        path = path.replace("{" + name + "}", "weights" if name == "kind" else "x")
    method = "PUT" if path.endswith(("/ttl", "/project")) else "POST"
    text = json.dumps(body).encode()
    url = str(wire.base_url).removesuffix("/api/v1/") + path
    response = wire.request(method, url, content=text, headers={"Content-Type": "application/json"}, timeout=30)
    assert response.status_code < 500, (path, body, response.text)
    assert response.status_code not in (408, 409), (path, body, response.text)


@given(data=st.binary(max_size=200), position=st.integers(0, 400), zstd=st.booleans())
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_damaged_protobuf_makes_a_500(fuzzed, data, position, zstd):
    wire, model = fuzzed
    body = bytearray(codec.encode_request(model, 50_000, [datum(6)], "cross_entropy"))
    body[position : position + len(data)] = data
    response = wire.send(wire.training_request(bytes(body), zstd))
    assert response.status_code < 500 and response.status_code not in (408, 409), response.text


def heartbeat_s(wire: Wire) -> float:
    started = time.perf_counter()
    wire.ok("session_heartbeat", session_id=wire.session_id)
    return time.perf_counter() - started


def test_stopping_answers_parked_polls_at_once(engine, tmp_path):
    pool = ThreadPoolExecutor(1)
    with running(engine, store=tmp_path, name=NAME) as url:
        wire = Wire(url)
        ack = wire.train(wire.model(), 2, [datum(3)])
        poll = pool.submit(wire.post, "/retrieve_future", json={"request_id": ack["request_id"]})
        time.sleep(0.5)
        stopping = time.monotonic()
    assert poll.result(timeout=10).json()["type"] == "try_again"
    assert time.monotonic() - stopping < 4


@pytest.mark.slow
def test_heartbeats_are_quick_beside_many_parked_polls(engine, tmp_path):
    with running(engine, store=tmp_path, name=NAME, settings=ServerSettings(long_poll_s=20)) as url:
        wire = Wire(url)
        model = wire.model()
        ack = wire.train(model, 2, [datum(3)])
        body = json.dumps({"request_id": ack["request_id"]}).encode()
        request = head(len(body), "/api/v1/retrieve_future", "application/json") + body
        parked = []
        for _ in range(2000):
            connection = connect(url)
            connection.sendall(request)
            parked.append(connection)
        p95 = min(np.quantile([heartbeat_s(wire) for _ in range(100)], 0.95) for _ in range(5))  # the quietest of five rounds
        assert p95 < 0.02
        wire.train(model, 1, [datum(3)])
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda one: answer(one, 30), parked))
        bad = [one for one in answers if b" 200 " not in one or b"loss_fn_outputs" not in one]
        assert not bad, (len(bad), bad[0])
        for connection in parked:
            connection.close()


def json_training(model: str, seq_id: int, tokens=(3, 4, 5), **target) -> dict:
    tensor = {"data": [4, 5, 6], "dtype": "int64"} | target
    datum = {"model_input": {"chunks": [{"tokens": list(tokens)}]}, "loss_fn_inputs": {"target_tokens": tensor}}
    return {"model_id": model, "seq_id": seq_id, "forward_backward_input": {"data": [datum], "loss_fn": "cross_entropy"}}


@pytest.mark.parametrize(
    ("odd", "text"),
    [
        ({"tokens": (3, 4, 2**32 + 5)}, "tokens hold an id that does not fit 32 bits"),
        ({"data": [], "shape": [0, 2**70]}, "shape is [0, 1180591620717411303424], allowed: one or two sizes, 0 or more and under 2**31"),
        ({"data": [], "shape": [2**16, 2**16]}, "0 values do not fill the shape [65536, 65536]"),
        ({"shape": [-1, -3]}, "allowed: one or two sizes, 0 or more"),
        ({"shape": [1] * 70}, "allowed: one or two sizes"),
        ({"shape": [3, 2**70], "sparse_crow_indices": [0, 1, 2, 3], "sparse_col_indices": [0, 0, 0]}, "under 2**31"),
    ],
)
def test_json_numbers_that_do_not_fit_are_refused_and_keep_their_place(wire, odd, text):
    model = wire.model()
    assert text in wire.failure(wire.ok("forward_backward", **json_training(model, 1, **odd)))
    assert wire.result(wire.train(model, 2, [datum(4)])).loss > 0


def test_a_seq_id_over_31_bits_is_refused(wire):
    assert "seq_id is 1099511627776" in wire.refused("forward_backward", **json_training(wire.model(), 2**40))


def test_targets_wider_than_the_wire_can_say_are_refused(wire):
    target = {"data": [4, 5], "dtype": "int64", "shape": [2, 2**70], "sparse_crow_indices": [0, 1, 2], "sparse_col_indices": [0, 0]}
    chunks = [{"tokens": [3, 4, 5]}]
    text = wire.refused("asample", prompt={"chunks": chunks}, sampling_params={}, base_model=NAME, target_prompt_logprobs=target)
    assert "target_prompt_logprobs: shape is" in text


def test_a_seed_over_64_bits_is_the_clients_mistake(wire):
    lora = {"rank": 4, "seed": 2**64}
    ack = wire.ok("create_model", session_id=wire.session_id, model_seq_id=900, base_model=NAME, lora_config=lora)
    assert "seed: got 18446744073709551616; allowed is a whole number of 64 bits" in wire.failure(ack)


def test_a_search_cursor_without_a_time_zone_is_refused(wire):
    text = wire.refused("sessions/search", cursor={"last_created_at": "2020-01-01T00:00:00", "last_session_id": "x"})
    assert "timezone" in text


def test_a_copy_into_a_run_that_holds_something_else_is_refused(wire):
    model = wire.model()
    path = wire.result(wire.ok("save_weights", model_id=model, seq_id=1, path="copied"))["path"]
    other = int(wire.model().rpartition(":")[2])
    text = wire.refused("copy_weights", source_path=path, session_id=wire.session_id, model_seq_id=other)
    assert "exists already and holds no weights/copied" in text


def test_a_full_table_of_futures_takes_no_place_in_the_order(engine, tmp_path):
    with running(engine, store=tmp_path, name=NAME, settings=ServerSettings(max_pending_futures=2)) as url:
        wire = Wire(url)
        model = wire.model()
        held = [wire.train(model, seq, [datum(4)]) for seq in (2, 3)]
        response = wire.post("/optim_step", json={"model_id": model, "seq_id": 1, "adam_params": {}})
        assert response.status_code == 429 and "2 requests wait for their answers" in response.json()["error"]
        wire.post("/cancel_future", json={"request_id": held[1]["request_id"]})
        assert "metrics" in wire.result(wire.step(model, 1))
        assert wire.result(held[0]).loss > 0


def alive() -> int:
    """How many snapshots of weights are in memory."""
    gc.collect()
    return sum(type(one) is AdapterWeights for one in gc.get_objects())


def test_finished_sessions_leave_no_weights_in_memory(wire, url):
    before = alive()
    for _ in range(5):
        other = Wire(url)
        model = other.model()
        other.train(model, 1, [datum(4)])
        other.result(other.ok("save_weights_for_sampler", model_id=model, seq_id=2, sampling_session_seq_id=0))
        other.ok(f"sessions/{other.session_id}/finish", reason={"type": "success"})
        other.close()
    assert alive() <= before + 1


def test_failed_requests_leave_no_bodies_in_memory(wire):
    model, short = wire.model(), np.ones(3, np.float32)
    data = [datum(500, seed=i) for i in range(20)] + [datum(4, weights=short)]
    for seq in range(1, 11):
        assert "weights has shape [3]" in wire.failure(wire.train(model, seq, data))
    gc.collect()
    mark = data[0].tokens.astype("<i4").tobytes()[:400]
    assert sum(mark in one for held in gc.get_objects() for one in gc.get_referents(held) if type(one) is bytes and len(one) > 200_000) <= 1


def test_published_weights_that_were_dropped_are_out_of_memory(engine, tmp_path):
    with running(engine, store=tmp_path, name=NAME, settings=ServerSettings(max_snapshot_bytes=1)) as url:
        wire = Wire(url)
        model = wire.model()
        before = alive()
        for seq in range(1, 21):
            ack = wire.ok("save_weights_for_sampler", model_id=model, seq_id=seq, sampling_session_seq_id=seq)
            sampler = wire.result(ack)["sampling_session_id"]
            wire.sampled(wire.sample(list(range(2, 40)), None, sampling_session_id=sampler, seq_id=0))
        assert alive() - before <= 3


def test_bodies_that_arrive_at_the_same_time_are_bounded_together(engine, tmp_path):
    """Three uploads of 1.3 MB are held half-way: a fourth is told to come back before it is read, and gets through once one is given up."""
    bounds = ServerSettings(max_receiving_bytes=4_000_000)
    with running(engine, store=tmp_path, name=NAME, settings=bounds) as url:
        wire = Wire(url)
        model = wire.model()
        body = codec.encode_request(model, 1, [datum(500, seed=i) for i in range(160)], "cross_entropy")
        assert 3 * len(body) < 4_000_000 < 4 * len(body)

        def receiving() -> int:
            return wire.get("/live").json()["server"]["receiving_bytes"]

        held = [connect(url) for _ in range(3)]
        for connection in held:
            connection.sendall(head(len(body)) + body[: len(body) // 2])
        wait_until(lambda: receiving() == 3 * len(body))
        with closing(connect(url)) as connection:
            connection.sendall(head(len(body)))  # and not a byte of it
            refused = answer(connection)
        assert b" 429 " in refused and b"retry-after: 1\r\n" in refused.lower()
        assert f"{3 * len(body)} bytes of other requests are being received and this one has {len(body)}".encode() in refused
        parts = iter([body[i : i + 50_000] for i in range(0, len(body), 50_000)])  # chunked: no length is declared
        response = wire.post("/forward_backward", content=parts, headers={"Content-Type": PROTOBUF})
        assert response.status_code == 429 and "at most 4000000 may be at the same time" in response.json()["error"]
        wire.ok("session_heartbeat", session_id=wire.session_id)  # small ones pass
        held.pop().close()
        wait_until(lambda: receiving() == 2 * len(body))
        assert wire.send(wire.training_request(body)).status_code == 200
        for connection in held:
            connection.sendall(body[len(body) // 2 :])
            assert b" 200 " in answer(connection, 10)  # the same request again: all three are one
            connection.close()
        wait_until(lambda: receiving() == 0)


def test_the_sdk_comes_back_when_there_was_no_room(engine, tmp_path):
    with running(engine, store=tmp_path, name=NAME, settings=ServerSettings(max_receiving_bytes=200_000)) as url:
        service = tinker.ServiceClient(base_url=url, api_key="tml-test-key")
        training = service.create_lora_training_client(NAME, rank=2).result()
        connection = connect(url)
        connection.sendall(head(150_000) + b"x")
        data = [
            tinker.Datum(model_input=tinker.ModelInput.from_ints([5] * 500), loss_fn_inputs={"target_tokens": [6] * 500}) for _ in range(30)
        ]
        future = training.forward_backward(data, "cross_entropy")
        time.sleep(1)
        connection.close()
        assert future.result(timeout=60).metrics["loss:sum"] > 0
        service.close("success").result(timeout=30)


@pytest.mark.slow
def test_uploads_that_are_refused_take_no_memory(engine, tmp_path):
    with running(engine, store=tmp_path, name=NAME, settings=ServerSettings(max_receiving_bytes=20 << 20)) as url:
        wire = Wire(url)
        blocker = connect(url)
        blocker.sendall(head(20 << 20) + bytes(1 << 20))
        before = resident_bytes()
        for _ in range(8):
            with closing(connect(url)) as connection:
                connection.sendall(head(20 << 20))
                try:
                    for _ in range(20):
                        connection.sendall(bytes(1 << 20))
                except ConnectionError:
                    pass
        assert resident_bytes() - before < 40 << 20
        wire.ok("session_heartbeat", session_id=wire.session_id)
        blocker.close()


def wait_until(true, timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_heartbeats_are_quick_beside_long_json(wire, monkeypatch):
    """Prompts of 500,000 tokens and a JSON training body of 300,000 are read in threads, a slice at a time: others come to run in between.

    How long another thread waits for the interpreter stands for what the event loop would wait (a client in this process waits as well).
    """
    threads, slices = set(), []
    original_decode, original_decoder = bodies.decode, bodies._decoder

    def decode(kind, body):
        if len(body) > 100_000:
            threads.add(threading.current_thread().name.rpartition("_")[0])
        return original_decode(kind, body)

    def decoder(kind):
        if kind in (list[int], list[int | float]):
            slices.append(1)
        return original_decoder(kind)

    for module in (bodies, sampling, ordered, old_json, routing):
        monkeypatch.setattr(module, "decode", decode)
    monkeypatch.setattr(bodies, "_decoder", decoder)
    model = wire.model()
    prompt = {"chunks": [{"type": "encoded_text", "tokens": list(range(1002, 2002)) * 500}]}
    asked = json.dumps({"prompt": prompt, "sampling_params": {"max_tokens": 4}, "base_model": NAME, "num_samples": 1}).encode()
    trained = json.dumps(json_training(model, 2, tokens=[1005] * 300_000, data=[1006] * 300_000)).encode()
    created = {"session_id": wire.session_id, "model_seq_id": 900, "base_model": NAME, "user_metadata": {"x": "y" * 1_000_000}}
    headers = {"Content-Type": "application/json"}
    quietest = 1.0
    with ThreadPoolExecutor(1) as pool:
        for path, body in [("asample", asked)] * 5 + [("forward_backward", trained), ("create_model", json.dumps(created).encode())]:
            sent, waits = pool.submit(wire.post, f"/{path}", content=body, headers=headers), []
            while not sent.done():
                started = time.perf_counter()
                time.sleep(0.001)
                waits.append(time.perf_counter() - started)
            quietest = min(quietest, float(np.quantile(waits, 0.95)))
            assert sent.result().status_code == (400 if path == "asample" else 200), sent.result().text
    assert threads == {"spindle-scan"} and len(slices) > 5 * 500_000 * 6 // bodies.SLICE_BYTES
    assert quietest < 0.02


def test_json_arrays_are_read_in_slices_like_whole(monkeypatch):
    monkeypatch.setattr(bodies, "SLICE_BYTES", 64)
    values = np.random.default_rng(0).integers(-(2**60), 2**60, 200).tolist()
    raw = msgspec.Raw(json.dumps(values, indent=1).encode())
    assert bodies.numbers(raw, "x", int).tolist() == values
    fractions = [value / 7 for value in range(-50, 50)]
    assert bodies.numbers(msgspec.Raw(json.dumps(fractions).encode()), "x", float).tolist() == fractions
    for text, told in (
        ("[" + "1, " * 50 + '"a"]', "x: Expected `int`, got `str` - at `$[50]`"),
        ("[[1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]", "x: Expected `int`, got `array` - at `$[0]`"),
        ("[" + "1, " * 50 + "1.5]", "x: Expected `int`, got `float` - at `$[50]`"),
        ('"' + "1," * 50 + '"', "x: Expected `array`, got `str`"),
        ('["' + "a" * 100 + '"]', "x: Expected `int`, got `str` - at `$[0]`"),
        ("{" + ", ".join(f'"{i}": {i}' for i in range(50)) + "}", "x: Expected `array`, got `object`"),
    ):
        with pytest.raises(InvalidRequest) as error:
            bodies.numbers(msgspec.Raw(text.encode()), "x", int)
        assert str(error.value) == told
    with pytest.raises(OverflowError):
        bodies.numbers(msgspec.Raw(json.dumps([2**70] * 3).encode()), "x", int)


def test_a_cancelled_create_leaves_no_model(wire, engine, monkeypatch):
    make, started, go_on = engine.create_adapter, threading.Event(), threading.Event()

    def slow(*args, **options):
        started.set()
        assert go_on.wait(20)
        return make(*args, **options)

    monkeypatch.setattr(engine, "create_adapter", slow)
    body = {"session_id": wire.session_id, "model_seq_id": 700, "base_model": NAME, "lora_config": {"rank": 2}}
    ack = wire.ok("create_model", **body)
    assert started.wait(20)
    wire.ok("cancel_future", request_id=ack["request_id"])
    go_on.set()
    assert "cancelled before it ran" in wire.failure(ack)
    wait_until(lambda: ack["model_id"] not in engine._homes)
    assert wire.post("/get_info", json={"model_id": ack["model_id"]}).status_code == 404
    assert wire.get(f"/training_runs/{ack['model_id']}").status_code == 404
    monkeypatch.undo()
    made = wire.ok("create_model", **body | {"model_seq_id": 701})
    wire.result(made)
    wire.ok("cancel_future", request_id=made["request_id"])  # too late: what is done stays done
    assert wire.result(made)["model_id"] == made["model_id"]
    assert wire.ok("get_info", model_id=made["model_id"])["lora_rank"] == 2
