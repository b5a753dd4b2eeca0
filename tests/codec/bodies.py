"""Request bodies for the codec's tests, and the oracle that reads them with protobuf and numpy."""

from __future__ import annotations

import numpy as np
import zstandard

from spindle import codec
from spindle.codec import wire_pb2 as wire
from spindle.types import Datum

NUMPY = {wire.DTYPE_FLOAT32: "<f4", wire.DTYPE_INT64: "<i8", wire.DTYPE_INT32: "<i4"}


def text_datum(tokens, **inputs) -> wire.Datum:
    """A Datum message of one text chunk; inputs are Tensor messages."""
    datum = wire.Datum()
    datum.model_input.add().encoded_text.tokens = np.asarray(tokens, "<i4").tobytes()
    for name, tensor in inputs.items():
        datum.loss_fn_inputs[name].CopyFrom(tensor)
    return datum


def dense(array, dtype=None) -> wire.Tensor:
    array = np.asarray(array)
    name = {"f": "<f4", "i": "<i8"}[array.dtype.kind] if dtype is None else dtype
    number = {text: kind for kind, text in NUMPY.items()}[name]
    return wire.Tensor(dense=array.astype(name).tobytes(), dtype=number, shape=array.shape)


def csr(array) -> wire.Tensor:
    """The CSR form of a dense [N, K] array, listing what is not 0."""
    array = np.asarray(array)
    rows, columns = np.nonzero(array)
    crow = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(array)))])
    return raw_csr(array[rows, columns], crow, columns, array.shape)


def raw_csr(values, crow, col, shape) -> wire.Tensor:
    values = np.asarray(values)
    name = "<f4" if values.dtype.kind == "f" else "<i8"
    tensor = wire.Tensor(dtype=wire.DTYPE_FLOAT32 if name == "<f4" else wire.DTYPE_INT64, shape=shape)
    tensor.sparse_csr.values = values.astype(name).tobytes()
    tensor.sparse_csr.crow_indices = np.asarray(crow, "<i8").tobytes()
    tensor.sparse_csr.col_indices = np.asarray(col, "<i8").tobytes()
    return tensor


def request(*data: wire.Datum, **fields) -> wire.ForwardBackwardRequest:
    return wire.ForwardBackwardRequest(**{"model_id": "run:train:0", "seq_id": 3, "loss_fn": "cross_entropy", "data": data, **fields})


def body(*data: wire.Datum, **fields) -> bytes:
    return request(*data, **fields).SerializeToString(deterministic=True)


def simple(n: int = 4, **inputs) -> wire.Datum:
    """n tokens 1..n with [n] targets and weights unless given."""
    return text_datum(range(1, n + 1), **{"target_tokens": dense(np.arange(n)), "weights": dense(np.ones(n, np.float32)), **inputs})


def read_tensor(tensor: wire.Tensor) -> np.ndarray:
    """What a Tensor message means, dense."""

    def cells(raw: bytes) -> np.ndarray:
        if tensor.dtype == wire.DTYPE_BFLOAT16:
            return (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4")
        return np.frombuffer(raw, NUMPY[tensor.dtype])

    if tensor.WhichOneof("encoding") == "dense":
        values = cells(tensor.dense)
        return values.reshape(tuple(tensor.shape) or (-1,))
    sparse = tensor.sparse_csr
    out = np.zeros(tuple(tensor.shape), cells(sparse.values).dtype)
    rows = np.repeat(np.arange(len(out)), np.diff(np.frombuffer(sparse.crow_indices, "<i8")))
    out[rows, np.frombuffer(sparse.col_indices, "<i8")] = cells(sparse.values)
    return out


def read_tokens(datum: wire.Datum) -> np.ndarray:
    return np.concatenate([np.frombuffer(chunk.encoded_text.tokens, "<i4") for chunk in datum.model_input])


def fill_all(scanned: codec.ScannedRequest, names=(), indices=None, default=None) -> dict[str, np.ndarray]:
    """All that fill writes for the datums (all of them, in order, by default). It writes the same into zeroed memory, which clear makes
    zero again."""
    indices = np.arange(scanned.num_datums) if indices is None else np.asarray(indices, np.int64)
    lengths, widths = scanned.lengths[indices], scanned.target_widths[indices]
    cells = int((lengths * np.maximum(widths, 1))[widths >= 0].sum())
    out = {
        "tokens": np.full(lengths.sum(), -7, np.int32),
        "targets": np.full(cells, -7, np.int64),
        **{name: np.full(cells, np.nan, np.float32) for name in names},
    }
    codec.fill(scanned, indices, out["tokens"], out["targets"], {name: (out[name], default) for name in names})
    twin = {name: np.zeros_like(array) for name, array in out.items()}
    inputs = {name: (twin[name], default) for name in names}
    codec.fill(scanned, indices, twin["tokens"], twin["targets"], inputs, zeroed=True)
    for name, array in out.items():
        assert twin[name].tobytes() == array.tobytes(), name
    codec.clear(scanned, indices, twin["targets"], inputs)
    for name in ("targets", *names):
        assert not any(twin[name].tobytes()), name
    return out


def datum(n: int = 4, **inputs) -> Datum:
    """The in-process twin of ``simple``."""
    return Datum(np.arange(1, n + 1), {"target_tokens": np.arange(n), "weights": np.ones(n, np.float32), **inputs})


def zstd(raw: bytes, declared: bool = True, **parameters) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=declared, **parameters).compress(raw)
