"""Per-sequence causal attention over packed rows, registered with transformers under one name.

A model built with ``attn_implementation=ATTENTION`` and called with ``packing=Packing(lengths)`` attends within each sequence only.
Cost is the sum of squared lengths. A sequence's result does not depend on its neighbours: every sequence (or run of sequences of
one length, as a batch) is a problem of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from spindle.errors import ServerError

varlen_attn: Any = None  # older torch: SDPA per run of sequences on every device
with suppress(ImportError):
    from torch.nn.attention.varlen import varlen_attn

ATTENTION = "spindle_packed"


class KeyValueCache(Protocol):
    """Where a sampler keeps keys and values; it also attends, because only it knows how they lie in memory."""

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, window: int | None, softcap: float | None
    ) -> torch.Tensor:
        """Store the new rows of one layer and attend to all of each sequence. q [T, H, D], k and v [T, Hkv, D] -> [T, H, D].

        One call per attention layer and forward pass. ``attend`` below does one run of sequences of equal length.
        """
        ...


class Packing:
    """How packed rows divide into sequences.

    lengths: new rows per sequence, [S], each at least 1, summing to T.
    cache: None (training, scoring: the rows are the whole sequences) or a KeyValueCache (the rows continue what it holds).
    """

    __slots__ = ("_cu_seqlens", "_there", "cache", "calls", "lengths", "runs")

    def __init__(self, lengths: Sequence[int], cache: KeyValueCache | None = None) -> None:
        self.lengths = [int(n) for n in lengths]
        self.cache = cache
        self.runs: list[tuple[int, int]] = []  # (sequences, rows of each): adjacent sequences of one length
        for n in self.lengths:
            if self.runs and self.runs[-1][1] == n:
                self.runs[-1] = (self.runs[-1][0] + 1, n)
            else:
                self.runs.append((1, n))
        self._cu_seqlens: dict[torch.device, torch.Tensor] = {}
        self._there: dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}
        self.calls = 0  # attention calls seen: the self-check at load compares it with the number of layers

    def cu_seqlens(self, device: torch.device) -> torch.Tensor:
        """[S + 1] int32 row offsets."""
        if device not in self._cu_seqlens:
            offsets = torch.zeros(len(self.lengths) + 1, dtype=torch.int32)
            torch.cumsum(torch.tensor(self.lengths), 0, out=offsets[1:])
            self._cu_seqlens[device] = offsets.to(device, non_blocking=True)
        return self._cu_seqlens[device]

    def on(self, x: torch.Tensor, device: torch.device) -> torch.Tensor:
        """x, which every layer of the pass gets, on the device of a later stage: moved once."""
        key = id(x), device
        if key not in self._there:
            self._there[key] = x, x.to(device)  # x too: an id is a tensor's own only while it lives
        return self._there[key][1]


def attend(q, k, v, scale, window, softcap) -> torch.Tensor:
    """q [B, H, n, D], k and v [B, Hkv, c, D], the queries being the last n of c positions -> [B, H, n, D]."""
    n, c = q.shape[2], k.shape[2]
    plain = n == c and (window is None or n <= window)
    mask = None
    if not plain and (n > 1 or (window is not None and c > window)):
        key_at = torch.arange(c, device=q.device)
        query_at = torch.arange(c - n, c, device=q.device)[:, None]
        mask = key_at <= query_at
        if window is not None:
            mask = mask & (key_at > query_at - window)
    if softcap is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=plain and n > 1, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    repeats = q.shape[1] // k.shape[1]
    if repeats > 1:
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = softcap * torch.tanh(scores / softcap)
    if plain:
        mask = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype) @ v


def _by_run(q, k, v, packing: Packing, scale, window, softcap) -> torch.Tensor:
    """[1, H, T, D] -> [T, H, D]: SDPA once per run of equal sequences. ``split`` keeps the backward at one concatenation."""
    rows = [count * n for count, n in packing.runs]
    out = []
    for (count, n), *qkv in zip(packing.runs, q.split(rows, 2), k.split(rows, 2), v.split(rows, 2), strict=True):
        q_run, k_run, v_run = (x if count == 1 else x.squeeze(0).unflatten(1, (count, n)).transpose(0, 1) for x in qkv)  # [count, H, n, D]
        out.append(attend(q_run, k_run, v_run, scale, window, softcap).transpose(1, 2).flatten(0, 1))
    return out[0] if len(out) == 1 else torch.cat(out)


def packed_attention(
    module, query, key, value, attention_mask=None, *, scaling=None, dropout=0.0, sliding_window=None, softcap=None, packing=None, **kwargs
):
    """The attention function that transformers calls. query [1, H, T, D], key and value [1, Hkv, T, D] -> ([1, T, H, D], None)."""
    if packing is None:
        raise ServerError(f"{type(module).__name__} was called without packing=Packing(lengths); a model loaded by BaseModel needs it")
    if kwargs.get("s_aux") is not None:
        raise ServerError(f"{type(module).__name__} uses attention sinks, which packed attention does not support")
    packing.calls += 1
    if packing.cache is not None:
        q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
        out = packing.cache.attend(module.layer_idx, q, k, v, scaling, sliding_window, softcap)
    elif varlen_attn is not None and softcap is None and query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
        cu, longest = packing.cu_seqlens(q.device), max(packing.lengths)
        window = (-1 if sliding_window is None else sliding_window - 1, 0)
        out = varlen_attn(q, k, v, cu, cu, longest, longest, scale=scaling, window_size=window, enable_gqa=q.shape[1] != k.shape[1])
    else:
        out = _by_run(query, key, value, packing, scaling, sliding_window, softcap)
    return out.unsqueeze(0), None


def _no_mask(*args, **kwargs) -> None:
    """Packing says what attends to what; no mask tensor is ever built."""
    return None


AttentionInterface.register(ATTENTION, packed_attention)
AttentionMaskInterface.register(ATTENTION, _no_mask)
