"""Protobuf messages made and read in Python: what clients, tests and small answers need. Requests are read by csrc/."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from spindle.codec import wire_pb2 as wire
from spindle.codec.arrays import _datum
from spindle.errors import InvalidRequest
from spindle.types import Datum, ForwardBackwardOutput, SampleOutput, TensorData

__all__ = ["decode_forward_backward", "encode_request", "encode_sample_response"]

_DTYPES = {"float32": wire.DTYPE_FLOAT32, "int64": wire.DTYPE_INT64, "int32": wire.DTYPE_INT32}
_STOP_REASONS = {"stop": wire.STOP_REASON_STOP, "length": wire.STOP_REASON_LENGTH}


def encode_request(
    model_id: str,
    seq_id: int,
    datums: Iterable[Datum],
    loss_fn: str,
    loss_fn_config: Mapping[str, float | str] | None = None,
    forward_only: bool = False,
    zstd: bool = False,
) -> bytes:
    """A forward_backward body as a client sends it; ``zstd`` compresses it (needs the ``zstandard`` package)."""
    request = wire.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, loss_fn=loss_fn, forward_only=forward_only)
    for key, value in (loss_fn_config or {}).items():
        if isinstance(value, str):
            request.loss_fn_config_v2[key].text = value
        else:
            request.loss_fn_config[key] = value
            request.loss_fn_config_v2[key].number = value
    for index, datum in enumerate(datums):
        tokens, inputs, spans = _datum(index, datum)
        message = request.data.add()
        if tokens.size and not -(1 << 31) <= tokens.min() <= tokens.max() < 1 << 31:
            raise InvalidRequest(f"datum {index}: tokens hold an id that does not fit 32 bits")
        message.model_input.add().encoded_text.tokens = tokens.astype("<i4").tobytes()
        for name, data, crow, col, shape in inputs:
            _write_tensor(message.loss_fn_inputs[name], TensorData(data, shape, crow, col))
        for of_inputs, sampled, sequence_id, offset, length in spans:
            span = (message.loss_fn_input_spans if of_inputs else message.model_input_spans).add()
            run = span.sampled_tokens if sampled else span.prompt_tokens
            run.sequence_id, run.offset, run.length = sequence_id, offset, length
            run.SetInParent()
    body = request.SerializeToString()
    if not zstd:
        return body
    import zstandard

    return zstandard.compress(body)


def decode_forward_backward(body: bytes) -> ForwardBackwardOutput:
    """The answer of a forward_backward: one dict per datum in input order, arrays are read-only views into ``body``'s copy."""
    message = wire.ForwardBackwardOutput.FromString(body)
    outputs: list[dict[str, np.ndarray]] = []
    for record in message.loss_fn_outputs:
        rows: list[dict[str, np.ndarray]] = [{} for _ in range(record.num_datums)]
        for name, tensor in record.fields.items():
            cells = np.frombuffer(tensor.data, _numpy_dtype(tensor.dtype))
            offsets = np.frombuffer(tensor.offsets, "<i8") // cells.itemsize
            for row, start, stop in zip(rows, offsets[:-1], offsets[1:], strict=True):
                row[name] = cells[start:stop].reshape(-1, *tensor.trailing_shape)
        outputs += rows
    return ForwardBackwardOutput(outputs, dict(message.metrics))


def encode_sample_response(output: SampleOutput) -> bytes:
    """The answer of a sampling request. Fields that are None stay absent."""
    message = wire.SampleResponse(prompt_cache_hit_tokens=output.prompt_cache_hit_tokens)
    for sequence in output.sequences:
        out = message.sequences.add(stop_reason=_STOP_REASONS[sequence.stop_reason], tokens=_bytes(sequence.tokens, "<i4"))
        if sequence.logprobs is not None:
            out.logprobs = _bytes(sequence.logprobs, "<f4")
        if sequence.topk_token_ids is not None and sequence.topk_logprobs is not None:
            _write_topk(out.topk_sampled_logprobs, sequence.topk_token_ids, sequence.topk_logprobs)
    if output.prompt_logprobs is not None:
        message.prompt_logprobs = _bytes(output.prompt_logprobs, "<f4")
    if output.topk_prompt_token_ids is not None and output.topk_prompt_logprobs is not None:
        _write_topk(message.topk_prompt_logprobs, output.topk_prompt_token_ids, output.topk_prompt_logprobs)
    if output.target_prompt_logprobs is not None:
        _write_tensor(message.target_prompt_logprobs, output.target_prompt_logprobs)
    if output.prompt_alt_token_ids is not None:
        _write_tensor(message.prompt_alt_tokens.tokens, TensorData(output.prompt_alt_token_ids))
        _write_tensor(message.prompt_alt_tokens.logprobs, TensorData(np.asarray(output.prompt_alt_logprobs, np.float32)))
    return message.SerializeToString()


def _bytes(array: np.ndarray, dtype: str) -> bytes:
    return np.ascontiguousarray(array, dtype).tobytes()


def _numpy_dtype(dtype: wire.DType) -> str:
    return {wire.DTYPE_FLOAT32: "<f4", wire.DTYPE_INT64: "<i8", wire.DTYPE_INT32: "<i4"}[dtype]


def _write_tensor(message: wire.Tensor, tensor: TensorData) -> None:
    data = np.ascontiguousarray(tensor.data)
    message.dtype = _DTYPES[data.dtype.name]
    message.shape.extend(np.shape(tensor.data) if tensor.shape is None else tensor.shape)
    if tensor.crow_indices is None or tensor.col_indices is None:
        message.dense = data.tobytes()
    else:
        message.sparse_csr.values = data.tobytes()
        message.sparse_csr.crow_indices = _bytes(tensor.crow_indices, "<i8")
        message.sparse_csr.col_indices = _bytes(tensor.col_indices, "<i8")


def _write_topk(message: wire.TopkLogprobs, token_ids: np.ndarray, logprobs: np.ndarray) -> None:
    message.length, message.k = token_ids.shape
    message.token_ids, message.logprobs = _bytes(token_ids, "<i4"), _bytes(logprobs, "<f4")
