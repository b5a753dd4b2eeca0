"""The JSON bodies that old clients send for forward and forward_backward, rewritten as the protobuf that everything else reads."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np

from spindle import codec
from spindle.errors import InvalidRequest
from spindle.server.bodies import Strict, decode, numbers
from spindle.server.ordered import Address, checked_seq_id
from spindle.types import Datum, TensorData

__all__ = ["JsonTensor", "Prompt", "training_body"]


class Chunk(msgspec.Struct):
    """``tokens`` of an encoded_text chunk; other types are refused by whoever reads the prompt."""

    tokens: msgspec.Raw = msgspec.Raw(b"[]")
    type: str = "encoded_text"


class Prompt(msgspec.Struct):
    chunks: list[Chunk]

    def tokens(self) -> np.ndarray:
        """[n] int64. Raises InvalidRequest for chunks that are not text."""
        for index, chunk in enumerate(self.chunks):
            if chunk.type != "encoded_text":
                raise InvalidRequest(f"chunk {index} is of type {chunk.type[:100]!r}, which is not supported: only encoded_text is")
        try:
            parts = [numbers(chunk.tokens, f"tokens of chunk {index}", int) for index, chunk in enumerate(self.chunks)]
        except OverflowError:
            raise InvalidRequest("a token id does not fit 64 bits") from None
        return np.concatenate(parts) if parts else np.empty(0, np.int64)


NULL = msgspec.Raw(b"null")


class JsonTensor(Strict):
    """A tensor in JSON: flat data, and CSR indices when it is sparse."""

    data: msgspec.Raw
    dtype: str
    shape: list[int] | None = None
    sparse_crow_indices: msgspec.Raw = NULL
    sparse_col_indices: msgspec.Raw = NULL

    def value(self, name: str) -> TensorData:
        if self.dtype not in ("float32", "int64"):
            raise InvalidRequest(f"{name}: dtype is {self.dtype[:100]!r}, allowed: float32, int64")
        if self.shape and (len(self.shape) > 2 or not all(0 <= size < 1 << 31 for size in self.shape)):
            raise InvalidRequest(f"{name}: shape is {self.shape[:8]}, allowed: one or two sizes, 0 or more and under 2**31")
        try:
            with np.errstate(over="ignore"):  # what does not fit float32 becomes inf, which is refused where it is read
                data = numbers(self.data, f"{name}.data", int if self.dtype == "int64" else np.float32)
        except OverflowError:
            raise InvalidRequest(f"{name}: a value does not fit {self.dtype}") from None
        dense = [bytes(indices) == b"null" for indices in (self.sparse_crow_indices, self.sparse_col_indices)]
        if all(dense):
            shape = self.shape or [data.size]
            if math.prod(shape) != data.size:
                raise InvalidRequest(f"{name}: {data.size} values do not fill the shape {shape}")
            return TensorData(data.reshape(shape))
        if any(dense) or self.shape is None:
            raise InvalidRequest(f"{name}: a sparse tensor needs shape, sparse_crow_indices and sparse_col_indices")
        try:
            crow, col = (
                numbers(self.sparse_crow_indices, f"{name}.sparse_crow_indices", int),
                numbers(self.sparse_col_indices, f"{name}.sparse_col_indices", int),
            )
        except OverflowError:
            raise InvalidRequest(f"{name}: an index does not fit 64 bits") from None
        return TensorData(data, tuple(self.shape), crow, col)


class JsonDatum(msgspec.Struct):
    model_input: Prompt
    loss_fn_inputs: dict[str, JsonTensor]


class JsonTraining(msgspec.Struct):
    data: list[JsonDatum]
    loss_fn: str
    loss_fn_config: dict[str, float | str] | None = None


class JsonRequest(msgspec.Struct):
    model_id: str
    seq_id: int | None = None
    forward_backward_input: JsonTraining | None = None
    forward_input: JsonTraining | None = None


def training_body(body: bytes | memoryview, forward_only: bool) -> bytes:
    """The protobuf twin of a JSON body. Raises MalformedBody, or InvalidRequest carrying model_id and seq_id when it names them."""
    address = decode(Address, body)
    if address.seq_id is not None:
        checked_seq_id(address.seq_id)
    try:
        request = decode(JsonRequest, body)
        given: Any = request.forward_input or request.forward_backward_input
        if given is None:
            raise InvalidRequest("the body has neither forward_backward_input nor forward_input")
        data = [
            Datum(
                datum.model_input.tokens(), {name: tensor.value(f"data[{index}].{name}") for name, tensor in datum.loss_fn_inputs.items()}
            )
            for index, datum in enumerate(given.data)
        ]
        return codec.encode_request(request.model_id, request.seq_id or 0, data, given.loss_fn, given.loss_fn_config, forward_only)
    except InvalidRequest as error:
        error.model_id, error.seq_id = address.model_id, address.seq_id or 0
        raise
