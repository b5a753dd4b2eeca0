"""A Spindle server in its own thread and a raw HTTP client, for benches that time what happens around the compute."""

from __future__ import annotations

import contextlib
import http.client
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests.tiny, wherever pytest was started

import numpy as np

import spindle
from spindle import Datum, SchedulerConfig
from spindle.compute.model import BaseModel
from spindle.server.serve import freeze_heap, running
from tests.tiny import VOCAB, tiny_llama

NAME = "bench/tiny"


class RawClient:
    """One keep-alive connection that speaks the Tinker wire by hand: no SDK between the clock and the server."""

    def __init__(self, url: str, session: str | None = None) -> None:
        host, port = url.removeprefix("http://").split(":")
        self.connection = http.client.HTTPConnection(host, int(port), timeout=120)
        self.connection.connect()
        self.session = session or self.post("create_session", {"tags": [], "sdk_version": "0.38.0"})["session_id"]

    def send(self, path: str, body: bytes, kind: str = "application/json", accept: str = "application/json") -> tuple[int, bytes]:
        headers = {"Content-Type": kind, "Accept": accept, "X-API-Key": "tml-bench"}
        self.connection.request("POST", f"/api/v1/{path}", body, headers)
        response = self.connection.getresponse()
        return response.status, response.read()

    def post(self, path: str, value: Any) -> Any:
        status, answer = self.send(path, json.dumps(value).encode())
        assert status == 200, f"{path}: {status} {answer[:500]!r}"
        return json.loads(answer)

    def wait(self, request_id: str) -> bytes:
        """The answer's bytes, by one long poll."""
        body = json.dumps({"request_id": request_id}).encode()
        status, answer = self.send("retrieve_future", body, accept="application/x-protobuf")
        assert status == 200, f"retrieve_future: {status} {answer[:500]!r}"
        return answer

    def create_model(self, number: int, rank: int = 8) -> str:
        ack = self.post(
            "create_model", {"session_id": self.session, "model_seq_id": number, "base_model": NAME, "lora_config": {"rank": rank}}
        )
        return json.loads(self.wait(ack["request_id"]))["model_id"]

    def train(self, body: bytes) -> str:
        status, answer = self.send("forward_backward", body, "application/x-protobuf")
        assert status == 200, f"forward_backward: {status} {answer[:500]!r}"
        return json.loads(answer)["request_id"]

    def step(self, model_id: str, seq_id: int) -> str:
        return self.post("optim_step", {"model_id": model_id, "seq_id": seq_id, "adam_params": {"learning_rate": 1e-4}})["request_id"]


def datum(length: int, seed: int = 0) -> Datum:
    tokens = np.random.default_rng(seed).integers(0, VOCAB, length + 1)
    return Datum(tokens[:-1], {"target_tokens": tokens[1:], "weights": np.ones(length, np.float32)})


@contextlib.contextmanager
def server(config: SchedulerConfig | None = None, **overrides: Any) -> Iterator[tuple[spindle.Engine, str]]:
    """A tiny Llama of one layer behind HTTP on loopback. Yields the engine and the URL."""
    model = BaseModel.load(tiny_llama(num_hidden_layers=1, **overrides))
    with (
        spindle.Engine(model, name=NAME, scheduler=config) as engine,
        tempfile.TemporaryDirectory() as store,
        running(engine, store=store) as url,
    ):
        freeze_heap()  # as a process that only serves does
        yield engine, url
