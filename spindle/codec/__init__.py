"""Bytes to micro-batch tensors and back. The only Python that imports the compiled extension (see csrc/README.md).

``scan`` reads and checks a request body once and keeps spans into it; ``fill`` writes chosen datums into a micro-batch's tensors;
``Answer`` holds the answer, written as its parts come. All of it runs without the GIL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from spindle.codec import _codec
from spindle.codec._codec import Answer, Limits, ScannedRequest, built_with, listed_cells, pool_stats, spread_input
from spindle.codec.arrays import scan_arrays
from spindle.codec.messages import decode_forward_backward, encode_request, encode_sample_response
from spindle.errors import MalformedBody

__all__ = [
    "Answer",
    "Limits",
    "ScannedRequest",
    "built_with",
    "clear",
    "decode_forward_backward",
    "encode_forward_backward",
    "encode_request",
    "encode_sample_response",
    "fill",
    "listed_cells",
    "peek",
    "peek_stats",
    "pool_stats",
    "scan",
    "scan_arrays",
    "spread_input",
]

_DEFAULT_LIMITS = Limits()


def scan(body: Any, content_encoding: str | None = None, limits: Limits | None = None) -> ScannedRequest:
    """Read and check a forward_backward body, once and whole.

    body: any contiguous buffer; an uncompressed one is kept and looked into, not copied. content_encoding: None, "identity" or "zstd".
    Raises MalformedBody when the bytes are not a readable request (or over a byte limit), InvalidRequest naming datum and input when
    they say something impossible; its ``model_id`` and ``seq_id`` are what the body names.
    """
    return _codec.scan(body, content_encoding, limits or _DEFAULT_LIMITS)


def fill(
    request: ScannedRequest,
    datum_indices: Sequence[int] | np.ndarray,
    tokens: Any,
    targets: Any | None,
    inputs: Mapping[str, tuple[Any, float | None]] | None = None,
    zeroed: bool = False,
) -> None:
    """Write datums of a scanned request, in the order given, end to end into numpy arrays or CPU torch tensors.

    tokens: [sum of lengths] int32. targets: [cells] int64, where a datum of n tokens has n cells, or n * K row-major when its
    target_tokens is [n, K]; None = not wanted. inputs: by name, ([cells] float32, default); a datum that lacks the input gets the
    default. CSR inputs are written dense, 0 where nothing is listed. zeroed: targets and inputs are all zero bytes, so only what is not
    zero is written; ``clear`` makes them so again.
    Raises ValueError or TypeError when the memory does not fit or a datum lacks an input that has no default (None).
    """
    indices = np.asarray(datum_indices, np.int64)
    _codec.fill(request, indices, _numpy(tokens), None if targets is None else _numpy(targets), _plain(inputs), zeroed)


def clear(
    request: ScannedRequest,
    datum_indices: Sequence[int] | np.ndarray,
    targets: Any | None,
    inputs: Mapping[str, tuple[Any, float | None]] | None = None,
) -> None:
    """Zero again what ``fill``, called with the same and ``zeroed``, wrote into targets and inputs. Before the request is released."""
    _codec.clear(request, np.asarray(datum_indices, np.int64), None if targets is None else _numpy(targets), _plain(inputs))


def encode_forward_backward(logprobs: Any, lengths: np.ndarray, widths: np.ndarray, metrics: Mapping[str, float]) -> bytes:
    """The protobuf answer of a forward_backward. logprobs: [cells] float32 in input order; lengths: [D] tokens per datum;
    widths: [D], 0 for [N] logprobs, K for [N, K]. Consecutive datums of equal width share one record."""
    answer = Answer(lengths, widths)
    answer.place(np.arange(len(lengths)), _numpy(logprobs))
    return answer.finish(list(metrics.items()))


def peek(body: Any, content_encoding: str | None = None, limits: Limits | None = None) -> tuple[str, int]:
    """(model_id, seq_id) from the head of a body, for a frontend that forwards it unopened. Inflates at most 128 KiB.

    Raises MalformedBody when the two are not there. Nothing else of the body is checked.
    """
    return peek_stats(body, content_encoding, limits)[:2]


def peek_stats(body: Any, content_encoding: str | None = None, limits: Limits | None = None) -> tuple[str, int, int]:
    """What ``peek`` says, and the number of bytes that it inflated to know it."""
    try:
        return _codec.peek(body, content_encoding, limits or _DEFAULT_LIMITS)
    except UnicodeDecodeError:
        raise MalformedBody("the body is not readable protobuf: model_id is not UTF-8") from None


def _plain(inputs: Mapping[str, tuple[Any, float | None]] | None) -> dict[str, tuple[Any, float | None]]:
    return {name: (_numpy(array), default) for name, (array, default) in (inputs or {}).items()}


def _numpy(array: Any) -> Any:
    return array.numpy() if hasattr(array, "numpy") else array
