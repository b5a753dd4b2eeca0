"""Plain dataclasses of the public API. Arrays are numpy; torch tensors are accepted where noted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from spindle.errors import UserError

__all__ = [
    "AdamParams",
    "Datum",
    "DimuonParams",
    "ForwardBackwardOutput",
    "LoraConfig",
    "OptimStepOutput",
    "SampleOutput",
    "SampledSequence",
    "SamplingParams",
    "TensorData",
]


@dataclass(frozen=True, eq=False)
class TensorData:
    """One loss input of one datum: dense, or sparse CSR (unlisted cells mean 0).

    data: the dense array, shape [N] or [N, K]; or the listed values, shape [nnz], when the two index arrays are given.
    shape: the dense shape; required for CSR, taken from ``data`` otherwise.
    crow_indices: [N + 1] int64, col_indices: [nnz] int64.
    """

    data: np.ndarray
    shape: tuple[int, ...] | None = None
    crow_indices: np.ndarray | None = None
    col_indices: np.ndarray | None = None

    @classmethod
    def from_dense(cls, array: Any) -> TensorData:
        """Wrap a numpy array, a list, or a CPU torch tensor (bfloat16 is widened to float32)."""
        if hasattr(array, "detach"):
            array = array.detach()
            if str(array.dtype) == "torch.bfloat16":
                array = array.float()
            array = array.cpu().numpy()
        return cls(np.ascontiguousarray(array))


@dataclass(frozen=True, eq=False)
class Datum:
    """One training sequence.

    tokens: [N] integer token ids. Position i predicts what follows token i.
    loss_fn_inputs: by name, e.g. ``target_tokens`` [N] or [N, K] integers, ``weights`` of the same shape, float32.
        Values may be numpy arrays, lists, torch tensors or ``TensorData``.
    model_input_spans, loss_fn_input_spans: where tokens and target_tokens come from, for ``stable_reinforce``: runs that tile them, each
        (``"prompt_tokens"`` or ``"sampled_tokens"``, sequence id, offset, length).
    """

    tokens: Any
    loss_fn_inputs: Mapping[str, Any] = field(default_factory=dict)
    model_input_spans: Sequence[tuple[str, str, int, int]] = ()
    loss_fn_input_spans: Sequence[tuple[str, str, int, int]] = ()


@dataclass(frozen=True)
class LoraConfig:
    """Shape of an adapter. ``alpha`` is 32 as in the Tinker API: the low-rank update is scaled by alpha / rank."""

    rank: int = 32
    alpha: float = 32.0
    seed: int | None = None
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True


FLOAT32_MAX = 3.4e38  # the optimizers compute in float32
MIN_EPS = 1e-37


def _check_numbers(params: Any, **below: float) -> None:
    """Every field is a number from 0 up that fits float32, below its bound in ``below``. Raises UserError naming the field."""
    for item in fields(params):
        value = getattr(params, item.name)
        if value is None and item.default is None:
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool)
        bound = below.get(item.name, FLOAT32_MAX)
        if not number or not 0.0 <= value < bound:
            allowed = "a finite number, 0 or more" if bound == FLOAT32_MAX else f"a number from 0 up, below {bound:g}"
            raise UserError(f"{item.name}: got {value!r}; allowed is {allowed}")


@dataclass(frozen=True)
class AdamParams:
    """Settings of one AdamW step, as ``torch.optim.AdamW`` means them. ``grad_clip_norm`` 0 means no clipping."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    def __post_init__(self) -> None:
        _check_numbers(self, beta1=1.0, beta2=1.0)
        if self.eps < MIN_EPS:
            raise UserError(f"eps: got {self.eps!r}; allowed is {MIN_EPS:g} or more: below, float32 makes 0/0 of a gradient that is zero")


@dataclass(frozen=True)
class DimuonParams:
    """Settings of one Dimuon step (our definition: ``spindle/optim/dimuon.py``)."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    grad_clip_norm: float = 0.0
    damping: float | None = None
    rank_lr_correction_exponent: float | None = None

    def __post_init__(self) -> None:
        _check_numbers(self, beta1=1.0, rank_lr_correction_exponent=8.0)


@dataclass(frozen=True)
class SamplingParams:
    """How to sample. ``stop``: None = the model's end tokens; [] = nothing but max_tokens; else a string, strings or token ids.

    ``temperature`` 0 is greedy. ``top_k`` -1 is off. ``max_tokens`` None = as many as the context holds.
    """

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


@dataclass(frozen=True, eq=False)
class ForwardBackwardOutput:
    """loss_fn_outputs: one dict per datum in input order; ``logprobs`` is float32 of the shape of target_tokens."""

    loss_fn_outputs: list[dict[str, np.ndarray]]
    metrics: dict[str, float]

    @property
    def loss(self) -> float:
        """The plain sum of the loss over tokens and datums."""
        return self.metrics["loss:sum"]


@dataclass(frozen=True)
class OptimStepOutput:
    metrics: dict[str, float]


@dataclass(frozen=True, eq=False)
class SampledSequence:
    """tokens: [n] int32 (with the stop token or the tokens that complete a stop string); logprobs: [n] float32."""

    stop_reason: str
    tokens: np.ndarray
    logprobs: np.ndarray
    topk_token_ids: np.ndarray | None = None  # [n, k] int32
    topk_logprobs: np.ndarray | None = None  # [n, k] float32


@dataclass(frozen=True, eq=False)
class SampleOutput:
    """prompt_logprobs: [prompt length] float32, NaN at 0; other fields None where not asked for."""

    sequences: list[SampledSequence]
    prompt_logprobs: np.ndarray | None = None
    topk_prompt_token_ids: np.ndarray | None = None  # [prompt length, k] int32
    topk_prompt_logprobs: np.ndarray | None = None  # [prompt length, k] float32
    target_prompt_logprobs: TensorData | None = None
    prompt_alt_token_ids: np.ndarray | None = None
    prompt_alt_logprobs: np.ndarray | None = None
    prompt_cache_hit_tokens: int = 0
