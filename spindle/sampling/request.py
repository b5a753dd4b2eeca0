"""What one sampling request says, and the check of all of it before anything is allocated."""

from __future__ import annotations

import math
import numbers
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from spindle.errors import UserError
from spindle.types import SamplingParams, TensorData

MAX_SAMPLES = 4096
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_CELLS = 1 << 23  # prompt tokens x width, of any answer kept per prompt token


@dataclass(slots=True)
class SampleRequest:
    """One sampling request; the fields are those of the Tinker API.

    prompt: [n] integer token ids. snapshot: frozen adapter weights, None = the base model.
    sequence_ids: one per sample, given by whoever announced them; with record_stability_info the sampled tokens and logprobs are kept
    under them, for ``session``.
    """

    prompt: Any
    params: SamplingParams = field(default_factory=SamplingParams)
    num_samples: int = 1
    snapshot: Any = None
    prompt_logprobs: bool = False
    prompt_logprobs_last_n: int | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: TensorData | None = None  # [n - 1, K] integer ids, -1 asks nothing
    prompt_alt_tokens_k: int = 0
    record_stability_info: bool = False
    sequence_ids: Sequence[str] | None = None
    session: str | None = None


@dataclass(slots=True, frozen=True, eq=False)
class Checked:
    """A request in the terms the sampler works in. targets: the asked cells, ``where`` = place in the flat answer."""

    request: SampleRequest
    prompt: np.ndarray  # [n] int64
    max_tokens: int
    seed: int  # uint64; a random one when the request has none
    temperature: float
    top_k: int
    top_p: float
    stop_ids: np.ndarray  # [s] int64
    stop_strings: tuple[str, ...]
    first_scored: int  # first row whose hidden state is needed for what is asked of the prompt; n when nothing is
    targets: tuple[np.ndarray, np.ndarray, np.ndarray] | None  # (rows [m], ids [m], where [m]), rows ascending
    last_n: int

    @property
    def asks_of_prompt(self) -> bool:
        """Whether anything is wanted of the prompt's own tokens."""
        return self.first_scored < len(self.prompt) or self.request.target_prompt_logprobs is not None


def validate(request: SampleRequest, model: Any, has_tokenizer: bool = True) -> Checked:
    """Check every field against the model (``vocab_size``, ``max_context``, ``eos_token_ids``).

    Raises UserError naming the field, what came and what is allowed.
    """
    vocab = int(model.vocab_size)
    params = request.params
    prompt = _token_ids("prompt", request.prompt, vocab)
    if prompt.size == 0:
        raise UserError("prompt is empty; it needs at least one token")
    length = int(prompt.size)
    max_tokens = _max_tokens(params.max_tokens, length, int(model.max_context))
    num_samples = _integer("num_samples", request.num_samples, 1, MAX_SAMPLES)
    temperature = _number("sampling_params.temperature", params.temperature)
    if temperature < 0:
        raise UserError(f"sampling_params.temperature is {temperature}; allowed: 0 (greedy) or more")
    top_p = _number("sampling_params.top_p", params.top_p)
    if not 0 < top_p <= 1:
        raise UserError(f"sampling_params.top_p is {top_p}; allowed: above 0, up to 1 (1 is off)")
    top_k = _integer("sampling_params.top_k", params.top_k, -1, None)
    if top_k == 0:
        raise UserError("sampling_params.top_k is 0; allowed: -1 (off) or 1 and more")
    seed = secrets.randbits(64)
    if params.seed is not None:
        seed = _integer("sampling_params.seed", params.seed, -(1 << 63), (1 << 64) - 1) % (1 << 64)
    stop_ids, stop_strings = _stops(params.stop, vocab, model.eos_token_ids)
    if stop_strings and not has_tokenizer:
        raise UserError(f"sampling_params.stop is {params.stop!r}, but this engine has no tokenizer to match strings with; give token ids")
    if request.sequence_ids is not None and len(request.sequence_ids) != num_samples:
        raise UserError(f"sequence_ids has {len(request.sequence_ids)} entries for num_samples {num_samples}; allowed: one per sample")
    last_n = _last_n(request, length)
    _width("topk_prompt_logprobs", request.topk_prompt_logprobs, vocab, length)
    _width("topk_sample_logprobs", request.topk_sample_logprobs, vocab, max_tokens)
    _width("prompt_alt_tokens_k", request.prompt_alt_tokens_k, None, length)
    targets = None if request.target_prompt_logprobs is None else _targets(request.target_prompt_logprobs, length, vocab)
    first = length
    if request.prompt_alt_tokens_k:
        first = 0
    if request.prompt_logprobs or request.topk_prompt_logprobs:
        first = min(first, length - 1 - last_n)
    if targets is not None and targets[0].size:
        first = min(first, int(targets[0][0]))
    return Checked(
        request, prompt, max_tokens, seed, temperature, min(top_k, vocab), top_p, stop_ids, stop_strings, first, targets, last_n
    )  # fmt: skip


def _integer(name: str, value: Any, low: int, high: int | None) -> int:
    allowed = f"a whole number, {low} or more" if high is None else f"a whole number from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or int(value) < low or (high is not None and int(value) > high):
        raise UserError(f"{name} is {value!r}; allowed: {allowed}")
    return int(value)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise UserError(f"{name} is {value!r}; allowed: a finite number")
    return float(value)


def _token_ids(name: str, value: Any, vocab: int) -> np.ndarray:
    array = np.asarray(value)
    if array.size == 0:
        return np.zeros(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise UserError(f"{name} has shape {list(array.shape)} and dtype {array.dtype}; allowed: one row of integer token ids")
    bad = np.flatnonzero((array < 0) | (array >= vocab))
    if bad.size:
        raise UserError(f"{name} holds token id {int(array[bad[0]])} at position {int(bad[0])}; allowed: 0 to {vocab - 1}")
    return array.astype(np.int64)


def _max_tokens(value: int | None, length: int, context: int) -> int:
    if value is None:
        if length >= context:
            raise UserError(f"prompt has {length} tokens, which leaves no room to sample: the context of the model is {context} tokens")
        return context - length
    value = _integer("sampling_params.max_tokens", value, 0, None)
    if length + value > context:
        raise UserError(
            f"prompt of {length} tokens + sampling_params.max_tokens {value} is {length + value}; "
            f"allowed: up to {context}, the context of the model"
        )
    return value


def _stops(stop: Any, vocab: int, eos: Sequence[int]) -> tuple[np.ndarray, tuple[str, ...]]:
    if stop is None:
        return np.asarray(eos, np.int64).reshape(-1), ()
    if isinstance(stop, str):
        stop = [stop]
    none = np.zeros(0, np.int64)
    allowed = "a string, a list of strings, or a list of token ids"
    if isinstance(stop, np.ndarray):
        stop = stop.tolist()
    if not isinstance(stop, (list, tuple)):
        raise UserError(f"sampling_params.stop is {stop!r}; allowed: {allowed}")
    if len(stop) > MAX_STOPS:
        raise UserError(f"sampling_params.stop has {len(stop)} entries; allowed: up to {MAX_STOPS}")
    if all(isinstance(s, str) for s in stop):
        for s in stop:
            if not 0 < len(s) <= MAX_STOP_CHARS:
                raise UserError(f"sampling_params.stop holds a string of {len(s)} characters; allowed: 1 to {MAX_STOP_CHARS}")
        return none, tuple(stop)
    if all(isinstance(s, numbers.Integral) and not isinstance(s, bool) for s in stop):
        return _token_ids("sampling_params.stop", stop, vocab), ()
    raise UserError(f"sampling_params.stop is {stop!r}; allowed: {allowed}")


def _last_n(request: SampleRequest, length: int) -> int:
    """How many tokens at the end of the prompt are scored."""
    value = request.prompt_logprobs_last_n
    if value is None:
        return length - 1
    if not request.prompt_logprobs:
        raise UserError(f"prompt_logprobs_last_n is {value!r} but prompt_logprobs is false; set prompt_logprobs to true")
    return _integer(f"prompt_logprobs_last_n (prompt of {length} tokens)", value, 1, length - 1)


def _width(name: str, value: int, vocab: int | None, rows: int) -> None:
    width = _integer(name, value, 0, vocab)
    if width * rows > MAX_CELLS:
        raise UserError(f"{name} {width} x {rows} tokens is {width * rows} cells; allowed: up to {MAX_CELLS}")


def _targets(tensor: TensorData, length: int, vocab: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    name = "target_prompt_logprobs"
    data = np.asarray(tensor.data)
    shape = tuple(int(n) for n in (data.shape if tensor.shape is None else tensor.shape))
    if data.dtype.kind not in "iu":
        raise UserError(f"{name} has dtype {data.dtype}; allowed: int64 token ids")
    if len(shape) != 2 or shape[0] != length - 1 or shape[1] < 1:
        raise UserError(f"{name} has shape {list(shape)}; allowed: [{length - 1}, K], one row per prompt token after the first")
    if shape[0] * shape[1] > MAX_CELLS and tensor.crow_indices is None:
        raise UserError(f"{name} has {shape[0] * shape[1]} cells; allowed: up to {MAX_CELLS}")
    if tensor.crow_indices is None and tensor.col_indices is None:
        if data.size != shape[0] * shape[1]:
            raise UserError(f"{name} has {data.size} values for shape {list(shape)}")
        rows = np.repeat(np.arange(shape[0]), shape[1])
    else:
        rows = _csr_rows(name, tensor, data, shape)
    ids = data.reshape(-1).astype(np.int64)
    bad = np.flatnonzero((ids < -1) | (ids >= vocab))
    if bad.size:
        raise UserError(f"{name} holds token id {int(ids[bad[0]])}; allowed: 0 to {vocab - 1}, or -1 to ask nothing")
    where = np.flatnonzero(ids >= 0)
    return rows[where], ids[where], where


def _csr_rows(name: str, tensor: TensorData, data: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if tensor.crow_indices is None or tensor.col_indices is None:
        raise UserError(f"{name} has one of crow_indices and col_indices; allowed: both (CSR) or none (dense)")
    crow, col = np.asarray(tensor.crow_indices, np.int64), np.asarray(tensor.col_indices, np.int64)
    nnz = data.size
    if data.ndim != 1 or nnz > MAX_CELLS or crow.shape != (shape[0] + 1,) or col.shape != (nnz,):
        raise UserError(f"{name}: {nnz} values, {crow.size} crow_indices, {col.size} col_indices do not fit shape {list(shape)}")
    if crow[0] != 0 or crow[-1] != nnz or (np.diff(crow) < 0).any():
        raise UserError(f"{name}.crow_indices must go up from 0 to the number of values, {nnz}")
    if nnz and (col.min() < 0 or col.max() >= shape[1]):
        raise UserError(f"{name}.col_indices holds a column outside 0 to {shape[1] - 1}")
    return np.repeat(np.arange(shape[0]), np.diff(crow))
