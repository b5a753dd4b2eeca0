"""Protobuf answers as the JSON that clients without ``Accept: application/x-protobuf`` expect."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from spindle import codec
from spindle.codec import wire_pb2

__all__ = ["as_json"]

STOP_REASONS = {0: "stop", 1: "length"}


def as_json(kind: str, proto: bytes) -> bytes:
    """kind: "forward_backward" or "sample"."""
    value = _forward_backward(proto) if kind == "forward_backward" else _sample(proto)
    return json.dumps(value).encode()


def _forward_backward(proto: bytes) -> dict[str, Any]:
    output = codec.decode_forward_backward(proto)
    return {
        "loss_fn_output_type": "ArrayRecord",
        "loss_fn_outputs": [
            {name: {"data": array.reshape(-1).tolist(), "dtype": "float32", "shape": list(array.shape)} for name, array in datum.items()}
            for datum in output.loss_fn_outputs
        ],
        "metrics": output.metrics,
    }


def _sample(proto: bytes) -> dict[str, Any]:
    message = wire_pb2.SampleResponse.FromString(proto)
    return {
        "type": "sample",
        "sequences": [
            {
                "stop_reason": STOP_REASONS[sequence.stop_reason],
                "tokens": np.frombuffer(sequence.tokens, np.int32).tolist(),
                "logprobs": _floats(sequence.logprobs),
            }
            for sequence in message.sequences
        ],
        "prompt_logprobs": _floats(message.prompt_logprobs) if message.prompt_logprobs else None,
        "topk_prompt_logprobs": _topk(message.topk_prompt_logprobs) if message.HasField("topk_prompt_logprobs") else None,
    }


def _floats(data: bytes) -> list[float | None]:
    return [None if math.isnan(value) else value for value in np.frombuffer(data, np.float32).tolist()]


def _topk(message: Any) -> list[list[tuple[int, float]] | None]:
    """Per prompt token its pairs, None at position 0."""
    ids = np.frombuffer(message.token_ids, np.int32).reshape(message.length, message.k).tolist()
    logprobs = np.frombuffer(message.logprobs, np.float32).reshape(message.length, message.k).tolist()
    rows: list[list[tuple[int, float]] | None] = [list(zip(*row, strict=True)) for row in zip(ids, logprobs, strict=True)]
    return [None, *rows[1:]]
