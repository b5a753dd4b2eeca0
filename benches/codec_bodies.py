"""The bodies of the codec bench: the classifier (W2), reinforcement learning (W1) and self-distillation (SDFT) workloads."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from spindle.codec import wire_pb2 as wire

VOCAB = 151_936


def zipf(rng: np.random.Generator, n: int, s: float = 1.3) -> np.ndarray:
    """n token ids, rank r with probability proportional to r ** -s, ranks scattered over the vocabulary."""
    ranks = np.minimum(rng.zipf(s, n), VOCAB) - 1
    return ranks * 48_271 % VOCAB  # the multiplier is coprime to VOCAB


def _dense(array: np.ndarray) -> wire.Tensor:
    kind = wire.DTYPE_INT64 if array.dtype == np.int64 else wire.DTYPE_FLOAT32
    return wire.Tensor(dense=array.tobytes(), dtype=kind, shape=array.shape)


def _csr(array: np.ndarray) -> wire.Tensor:
    rows, columns = np.nonzero(array)
    crow = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(array)))]).astype(np.int64)
    tensor = wire.Tensor(dtype=wire.DTYPE_INT64 if array.dtype == np.int64 else wire.DTYPE_FLOAT32, shape=array.shape)
    tensor.sparse_csr.values = array[rows, columns].tobytes()
    tensor.sparse_csr.crow_indices = crow.tobytes()
    tensor.sparse_csr.col_indices = columns.tobytes()
    return tensor


def _request(rng: np.random.Generator, lengths: np.ndarray, loss_fn: str, inputs: Callable[[int], dict[str, wire.Tensor]]) -> bytes:
    request = wire.ForwardBackwardRequest(model_id="0f9a4c57-bench:train:0", seq_id=7, loss_fn=loss_fn)
    for n in lengths.tolist():
        datum = request.data.add()
        datum.model_input.add().encoded_text.tokens = zipf(rng, n).astype(np.int32).tobytes()
        for name, tensor in inputs(n).items():
            datum.loss_fn_inputs[name].CopyFrom(tensor)
    return request.SerializeToString()


def classifier(form: str, labelled: float | None = None, datums: int = 128, seed: int = 0) -> bytes:
    """W2: [N, 5] target_tokens and weights, ``form`` csr or dense; one labelled row, or the share given."""
    rng = np.random.default_rng(seed)
    write = {"csr": _csr, "dense": _dense}[form]

    def inputs(n: int) -> dict[str, wire.Tensor]:
        targets, weights = np.zeros((n, 5), np.int64), np.zeros((n, 5), np.float32)
        rows = [n - 1] if labelled is None else np.flatnonzero(rng.random(n) < labelled)
        targets[rows] = zipf(rng, 5 * len(rows)).reshape(-1, 5)
        weights[rows] = rng.random((len(rows), 5), np.float32) + 0.01
        return {"target_tokens": write(targets), "weights": write(weights)}

    return _request(rng, rng.normal(1631, 200, datums).astype(np.int64), "cross_entropy", inputs)


def reinforcement(datums: int = 64, length: int = 16_058, seed: int = 0) -> bytes:
    """W1: target_tokens, logprobs and advantages of [N]; half the positions are prompt, whose logprobs and advantages are exactly 0."""
    rng = np.random.default_rng(seed)

    def inputs(n: int) -> dict[str, wire.Tensor]:
        logprobs = np.where(np.arange(n) < n // 2, 0, -rng.exponential(0.5, n)).astype(np.float32)
        advantages = np.where(np.arange(n) < n // 2, 0, rng.normal()).astype(np.float32)
        return {"target_tokens": _dense(zipf(rng, n)), "logprobs": _dense(logprobs), "advantages": _dense(advantages)}

    return _request(rng, np.full(datums, length), "importance_sampling", inputs)


def distillation(datums: int = 16, seed: int = 0) -> bytes:
    """SDFT: dense [N, 20] target_tokens and weights, every row labelled."""
    rng = np.random.default_rng(seed)

    def inputs(n: int) -> dict[str, wire.Tensor]:
        weights = rng.dirichlet(np.full(20, 0.3), n).astype(np.float32)
        return {"target_tokens": _dense(zipf(rng, 20 * n).reshape(n, 20)), "weights": _dense(weights)}

    return _request(rng, rng.normal(1631, 200, datums).astype(np.int64), "cross_entropy", inputs)
