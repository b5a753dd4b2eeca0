"""In-process requests: a caller's arrays, lists and torch tensors as plain numpy arrays that the scanner can look into."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from spindle.codec._codec import Limits, ScannedRequest
from spindle.codec._codec import scan_arrays as _scan_arrays
from spindle.errors import InvalidRequest
from spindle.types import Datum, TensorData

__all__ = ["scan_arrays"]


def scan_arrays(
    model_id: str,
    seq_id: int,
    datums: Iterable[Datum],
    loss_fn: str,
    loss_fn_config: Mapping[str, float | str] | None = None,
    forward_only: bool = False,
    limits: Limits | None = None,
) -> ScannedRequest:
    """The in-process twin of ``scan``: the same checks, the same result, with views into the caller's arrays.

    Tokens and ``target_tokens`` of int32 or int64 and other inputs of float32 are not copied; other number types are converted.
    Raises InvalidRequest naming the datum and the input.
    """
    try:
        plain = [_datum(index, datum) for index, datum in enumerate(datums)]
        config = {str(key): value if isinstance(value, str) else float(value) for key, value in (loss_fn_config or {}).items()}
    except (TypeError, ValueError) as error:
        if isinstance(error, InvalidRequest):
            error.model_id, error.seq_id = model_id, seq_id
            raise
        raise InvalidRequest(f"loss_fn_config: {error}", model_id, seq_id) from error
    return _scan_arrays(model_id, seq_id, plain, loss_fn, config, forward_only, limits or Limits())


def _datum(index: int, datum: Datum) -> tuple[np.ndarray, list[tuple], list[tuple]]:
    tokens = _array(index, "model_input", datum.tokens)
    if tokens.ndim != 1 or tokens.dtype.kind != "i":
        raise InvalidRequest(
            f"datum {index}: model_input has shape {list(tokens.shape)} and dtype {tokens.dtype}: one row of integers is needed"
        )
    spans = [_span(index, False, span) for span in datum.model_input_spans] + [
        _span(index, True, span) for span in datum.loss_fn_input_spans
    ]
    return tokens, [_input(index, str(name), value) for name, value in datum.loss_fn_inputs.items()], spans


def _span(index: int, of_inputs: bool, span: Any) -> tuple[bool, bool, str, int, int]:
    field = "loss_fn_input_spans" if of_inputs else "model_input_spans"
    try:
        kind, sequence_id, offset, length = span
        checked = (of_inputs, kind == "sampled_tokens", str(sequence_id), operator.index(offset), operator.index(length))
    except (TypeError, ValueError):
        kind = None
    if kind not in ("prompt_tokens", "sampled_tokens") or not all(-(2**63) <= number < 2**63 for number in checked[3:]):
        raise InvalidRequest(
            f"datum {index}: {field} has {span!r}: a span is (prompt_tokens or sampled_tokens, sequence_id, offset, length)"
        )
    return checked


def _input(index: int, name: str, value: Any) -> tuple:
    if getattr(value, "layout", None) is not None and str(value.layout) == "torch.sparse_csr":
        value = TensorData(value.values(), tuple(value.shape), value.crow_indices(), value.col_indices())
    if not isinstance(value, TensorData):
        return name, _array(index, name, value), None, None, None
    data = _array(index, name, value.data)
    shape = None if value.shape is None else tuple(int(size) for size in value.shape)
    if value.crow_indices is None and value.col_indices is None:
        return name, data, None, None, shape
    if value.crow_indices is None or value.col_indices is None:
        raise InvalidRequest(f"datum {index}: {name} has only one of crow_indices and col_indices: CSR needs both")
    crow, col = (
        _array(index, f"{name}: {part}", given).astype(np.int64, copy=False)
        for part, given in (("crow_indices", value.crow_indices), ("col_indices", value.col_indices))
    )
    return name, data, crow, col, shape or ()


def _array(index: int, name: str, value: Any) -> np.ndarray:
    """C-contiguous int32, int64 or float32."""
    if hasattr(value, "detach"):
        value = value.detach()
        value = (value.float() if str(value.dtype) == "torch.bfloat16" else value).cpu().numpy()
    try:
        array = np.ascontiguousarray(value) if np.ndim(value) else np.asarray(value)
    except ValueError as error:
        raise InvalidRequest(f"datum {index}: {name} is not an array: {error}") from error
    if array.size == 0 and not isinstance(value, np.ndarray):  # an empty list says nothing of its type
        return array.astype(np.int64)
    if array.dtype.kind == "f":
        with np.errstate(over="ignore"):  # what does not fit float32 becomes inf, which the scanner refuses by its index
            return array.astype(np.float32, copy=False)
    if array.dtype.kind in "iub":
        return array if array.dtype in (np.int32, np.int64) else array.astype(np.int64)
    raise InvalidRequest(f"datum {index}: {name} has dtype {array.dtype}: numbers are needed")
