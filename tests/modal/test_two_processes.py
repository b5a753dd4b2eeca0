"""The stock SDK trains through a frontend process and a trainer process, with latency between them."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import httpx
import numpy as np
import pytest
import tinker
import torch
import zstandard

from spindle import AdamParams, Datum, codec
from spindle.compute.model import BaseModel
from spindle.engine import Engine
from tests.modal.loopback import KEY, NAME
from tests.tiny import VOCAB, tiny_llama

LATENCY_S = 0.01
TRAINING = ("forward_backward", "optim_step", "retrieve_future")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(port: int, process: subprocess.Popen) -> None:
    for _ in range(900):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        assert process.poll() is None, "a process of the loopback stopped"
        time.sleep(0.1)


class Loopback:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.trainer_port, self.port = free_port(), free_port()
        self.log = directory / "hops.jsonl"
        self.url = f"http://127.0.0.1:{self.port}"
        self.start_trainer()
        self.frontend = self._start("frontend", self.port, self.trainer_port, self.log, LATENCY_S)
        wait_for(self.port, self.frontend)

    @staticmethod
    def _start(*arguments: object) -> subprocess.Popen:
        return subprocess.Popen([sys.executable, "-m", "tests.modal.loopback", *map(str, arguments)], cwd=Path(__file__).parents[2])

    def start_trainer(self) -> None:
        self.trainer = self._start("trainer", self.trainer_port, self.directory / "store")
        wait_for(self.trainer_port, self.trainer)

    def hops(self) -> list[dict]:
        """Every call so far that is about training; sessions beat and end by themselves."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [hop for hop in map(json.loads, lines) if hop["path"].rpartition("/")[2] in TRAINING]

    def post(self, path: str, headers: dict | None = None, **kwargs) -> httpx.Response:
        return httpx.post(f"{self.url}/api/v1/{path}", headers={"X-API-Key": KEY} | (headers or {}), timeout=60, **kwargs)


@pytest.fixture(scope="module")
def loopback(tmp_path_factory):
    running = Loopback(tmp_path_factory.mktemp("loopback"))
    yield running
    for process in (running.frontend, running.trainer):
        process.kill()
        process.wait()


@pytest.fixture
def training(loopback):
    service = tinker.ServiceClient(base_url=loopback.url, api_key=KEY)
    yield service.create_lora_training_client(base_model=NAME, rank=4, seed=1).result()
    service.close("success")


def classifier(datums: int, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """tokens [N], targets [N, 5], weights [N, 5] with one labelled row; Zipf ids."""
    rng = np.random.default_rng(seed)
    out = []
    for length in rng.integers(300, 500, datums):
        targets, weights = np.zeros((length, 5), np.int64), np.zeros((length, 5), np.float32)
        targets[-1], weights[-1] = rng.choice(np.arange(1, VOCAB), 5, replace=False), [1, 0.5, 0.5, 0.25, 0.25]
        out.append(((rng.zipf(1.2, length) - 1) % VOCAB, targets, weights))
    return out


def for_sdk(rows) -> list[tinker.Datum]:
    return [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints(tokens.tolist()),
            loss_fn_inputs={"target_tokens": torch.from_numpy(targets), "weights": torch.from_numpy(weights)},
        )
        for tokens, targets, weights in rows
    ]


def test_the_numbers_are_the_engines_own(training):
    rows = classifier(4)
    with Engine(BaseModel.load(tiny_llama())) as engine:
        adapter = engine.create_adapter(rank=4, seed=1)
        data = [Datum(tokens, {"target_tokens": targets, "weights": weights}) for tokens, targets, weights in rows]
        for _ in range(3):
            ours = training.forward_backward(for_sdk(rows), "cross_entropy").result()
            training.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
            theirs = adapter.forward_backward(data, "cross_entropy").result()
            adapter.optim_step(AdamParams(learning_rate=1e-2)).result()
            assert ours.metrics["loss:sum"] == pytest.approx(theirs.loss, rel=1e-6)
            for got, want in zip(ours.loss_fn_outputs, theirs.loss_fn_outputs, strict=True):
                np.testing.assert_allclose(got["logprobs"].to_numpy(), want["logprobs"], atol=1e-5)


def test_one_hop_per_submit_and_one_per_retrieve_and_no_byte_more(loopback, training):
    before = len(loopback.hops())
    steps = 5
    for _ in range(steps):
        training.forward(for_sdk(classifier(16)), "cross_entropy").result()
        training.optim_step(tinker.AdamParams()).result()
    hops = loopback.hops()[before:]
    assert Counter(hop["path"].rpartition("/")[2] for hop in hops) == {
        "forward_backward": steps,
        "optim_step": steps,
        "retrieve_future": 2 * steps,
    }
    for hop in hops:
        if hop["path"].endswith("forward_backward"):
            assert hop["frame"] <= 1.02 * hop["body"]
            assert hop["seconds"] >= 2 * LATENCY_S


def test_the_envelope_stays_compressed(loopback, training):
    """Seven times less travels than a frontend that inflates would send."""
    before = len(loopback.hops())
    rows = classifier(16, seed=5)
    training.forward(for_sdk(rows), "cross_entropy").result()
    sent = next(hop["body"] for hop in loopback.hops()[before:] if hop["path"].endswith("forward_backward"))
    data = for_sdk(rows)
    assert data[0].loss_fn_inputs["weights"].sparse_crow_indices is not None  # as the SDK sends it
    inflated = sum(4 * len(tokens) + 2 * 8 * (len(tokens) + 1) for tokens, _, _ in rows)  # ids, and two row pointers
    assert inflated > 7 * sent


def body_for(model_id: str, seq_id: int) -> bytes:
    data = [Datum([1, 2, 3], {"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]})]
    return codec.encode_request(model_id, seq_id, data, "cross_entropy", zstd=True)


PROTO = {"Content-Type": "application/x-protobuf", "Content-Encoding": "zstd"}


@pytest.mark.parametrize(
    ("body", "complaint"), [(b"not zstd at all", "zstd"), (zstandard.compress(b"\xff" * 50), ""), (zstandard.compress(b""), "")]
)
def test_an_unreadable_body_is_refused_before_it_travels(loopback, body, complaint):
    before = len(loopback.hops())
    answer = loopback.post("forward_backward", headers=PROTO, content=body)
    assert answer.status_code == 400 and answer.json()["category"] == "user" and complaint in answer.json()["error"]
    assert len(loopback.hops()) == before


def test_a_body_over_the_limit_is_refused_before_it_travels(loopback):
    before = len(loopback.hops())
    answer = loopback.post("forward_backward", headers=PROTO, content=bytes((64 << 20) + 1))
    assert answer.status_code == 413
    assert answer.json()["error"] == "the body is over 67108864 bytes, the most of one request: send fewer datums at a time"
    assert len(loopback.hops()) == before


def test_a_wrong_key_is_the_trainers_to_refuse(loopback):
    assert loopback.post("create_session", headers={"X-API-Key": "tml-someone-else"}, json={}).status_code == 401


def test_health_is_the_frontends_own(loopback):
    before = len(loopback.hops())
    assert httpx.get(f"{loopback.url}/api/v1/healthz").json() == {"status": "ok"}
    assert len(loopback.hops()) == before


def test_large_answers_are_compressed_when_the_client_accepts_it(loopback, training):
    rows = classifier(16, seed=2)
    request = training.forward(for_sdk(rows), "cross_entropy")
    request.result()
    request_id = f"{training.model_id}:1"
    accept = {"Accept": "application/x-protobuf"}
    plain = loopback.post("retrieve_future", headers=accept | {"Accept-Encoding": "identity"}, json={"request_id": request_id})
    packed = loopback.post("retrieve_future", headers=accept | {"Accept-Encoding": "gzip"}, json={"request_id": request_id})
    assert "content-encoding" not in plain.headers and plain.content == packed.content
    assert codec.decode_forward_backward(plain.content).loss_fn_outputs[0]["logprobs"].shape == rows[0][1].shape


def test_what_a_lost_container_held_is_gone_and_the_checkpoint_is_not(loopback, training):
    """Last: it replaces the trainer."""
    data = for_sdk(classifier(2))
    training.forward_backward(data, "cross_entropy").result()
    training.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
    path = training.save_state("before-the-loss").result().path
    expected = training.forward(data, "cross_entropy").result().metrics["loss:sum"]
    loopback.trainer.kill()
    loopback.trainer.wait()
    down = loopback.post("optim_step", json={"model_id": training.model_id, "seq_id": 9, "adam_params": {}})
    assert down.status_code == 503 and "the trainer gave no answer" in down.json()["error"]
    loopback.start_trainer()
    for path_, body in (
        ("optim_step", {"model_id": training.model_id, "seq_id": 9, "adam_params": {}}),
        ("retrieve_future", {"request_id": f"{training.model_id}:2"}),
    ):
        gone = loopback.post(path_, json=body)
        assert gone.status_code == 410 and gone.json()["category"] == "user"
        assert "was in a container that is gone" in gone.json()["error"] and "load your last checkpoint" in gone.json()["error"]
    assert loopback.post("forward_backward", headers=PROTO, content=body_for(training.model_id, 9)).status_code == 410
    assert loopback.post("retrieve_future", json={"request_id": "nobody:train:0:1"}).status_code == 404
    stranger = loopback.post("retrieve_future", headers={"X-API-Key": "tml-someone-else"}, json={"request_id": f"{training.model_id}:2"})
    assert stranger.status_code == 401

    service = tinker.ServiceClient(base_url=loopback.url, api_key=KEY)
    again = service.create_training_client_from_state_with_optimizer(path).result()
    assert again.forward(data, "cross_entropy").result().metrics["loss:sum"] == pytest.approx(expected, rel=1e-6)
    service.close("success")
