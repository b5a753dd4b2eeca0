"""The wire by hand: plain httpx, so that a test can send what no client library would."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np

from spindle import codec
from spindle.codec import wire_pb2
from spindle.types import Datum
from tests.tiny import VOCAB

NAME = "spindle/tiny"
PROTOBUF = "application/x-protobuf"


def datum(length: int, seed: int = 0, **inputs: Any) -> Datum:
    tokens = np.random.default_rng(seed).integers(2, VOCAB, length + 1)
    return Datum(tokens[:-1], {"target_tokens": tokens[1:], "weights": np.ones(length, np.float32)} | inputs)


class Wire(httpx.Client):
    """One session on a server."""

    def __init__(self, url: str, key: str | None = None, session: bool = True) -> None:
        super().__init__(base_url=f"{url}/api/v1", timeout=60, headers={"X-API-Key": key} if key else {})
        self.session_id = self.ok("create_session", tags=[], user_metadata={}, sdk_version="0.38")["session_id"] if session else ""
        self.models = 0

    def ok(self, path: str, /, **body: Any) -> Any:
        response = self.post(f"/{path}", json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def refused(self, path: str, /, status: int = 400, **body: Any) -> str:
        """The text of an error that a client must take as final."""
        response = self.post(f"/{path}", json=body)
        assert response.status_code == status, (response.status_code, response.text)
        assert response.json()["category"] == "user"
        return response.json()["error"]

    def model(self, base_model: str = NAME, optimizer: dict[str, Any] | None = None, **lora: Any) -> str:
        number, self.models = self.models, self.models + 1
        extra = {"optimizer_config": optimizer} if optimizer else {}
        ack = self.ok(
            "create_model",
            session_id=self.session_id,
            model_seq_id=number,
            base_model=base_model,
            lora_config={"rank": 4, "seed": 1} | lora,
            **extra,
        )
        return self.result(ack)["model_id"]

    def raw(self, request_id: str, proto: bool = True) -> httpx.Response:
        headers = {"Accept": PROTOBUF} if proto else {}
        for _ in range(10):
            response = self.post("/retrieve_future", json={"request_id": request_id}, headers=headers)
            if "try_again" not in response.text[:40]:
                return response
        raise AssertionError(f"{request_id} is still pending")

    def result(self, ack: dict[str, Any]) -> Any:
        """The JSON answer, or the decoded forward_backward output."""
        response = self.raw(ack["request_id"])
        assert response.status_code == 200, response.text
        if response.headers["content-type"] == PROTOBUF:
            return codec.decode_forward_backward(response.content)
        value = response.json()
        assert "error" not in value, value
        return value

    def failure(self, ack: dict[str, Any]) -> str:
        """The text of a future that failed by the user's fault."""
        response = self.raw(ack["request_id"])
        assert response.status_code == 200, response.text
        assert response.json()["category"] == "user", response.text
        return response.json()["error"]

    def train(
        self, model_id: str, seq_id: int, data: list[Datum], loss_fn: str = "cross_entropy", zstd: bool = False, **options: Any
    ) -> Any:
        """Submit a forward_backward; its acknowledgement."""
        body = codec.encode_request(model_id, seq_id, data, loss_fn, zstd=zstd, **options)
        response = self.send(self.training_request(body, zstd))
        assert response.status_code == 200, response.text
        return response.json()

    def training_request(self, body: bytes, zstd: bool = False) -> httpx.Request:
        headers = {"Content-Type": PROTOBUF} | ({"Content-Encoding": "zstd"} if zstd else {})
        return self.build_request("POST", "/forward_backward", content=body, headers=headers)

    def step(self, model_id: str, seq_id: int, **params: Any) -> Any:
        return self.ok("optim_step", model_id=model_id, seq_id=seq_id, adam_params=params)

    def grad_norm(self, model_id: str, seq_id: int) -> float:
        """The norm of what has accumulated, which is cleared."""
        return self.result(self.step(model_id, seq_id, learning_rate=0.0))["metrics"]["grad_norm"]

    def sample(self, prompt: list[int], base_model: str | None = NAME, num_samples: int = 1, **options: Any) -> Any:
        params = options.pop("sampling_params", {"max_tokens": 4})
        where = {"base_model": base_model} if base_model else {}
        chunks = [{"tokens": prompt, "type": "encoded_text"}]
        return self.ok("asample", prompt={"chunks": chunks}, sampling_params=params, num_samples=num_samples, **where, **options)

    def sampled(self, ack: dict[str, Any]) -> wire_pb2.SampleResponse:
        response = self.raw(ack["request_id"])
        assert response.headers["content-type"] == PROTOBUF, response.text
        return wire_pb2.SampleResponse.FromString(response.content)


def tokens_of(response: wire_pb2.SampleResponse) -> list[list[int]]:
    return [np.frombuffer(sequence.tokens, np.int32).tolist() for sequence in response.sequences]
