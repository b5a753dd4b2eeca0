"""Keys and values of running samples and of prompts, and the attention over them.

A prompt's keys and values lie in a PromptKV, written once by prefill and shared from then on. A running sample owns one row of a
Bank; a bank holds rows of one capacity, the powers of two, so that a decode step is one attention call per bank and layer and wastes
at most half of what it reads. Rows 0..count-1 of a bank are always in use: a removed row is filled by the last one. Keys and values of a
layer lie on the device that the layer lies on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

from spindle.compute.attention import attend

SMALLEST = 64  # tokens, capacity of the smallest bank


def capacity_for(tokens: int) -> int:
    """The bank that a sample of that many tokens lies in."""
    return max(SMALLEST, 1 << (tokens - 1).bit_length())


class PromptKV:
    """Keys and values of one prompt: per layer [Hkv, length, D], of which the first ``filled`` tokens are valid."""

    __slots__ = ("filled", "keys", "length", "values")

    def __init__(self, length: int, source: PromptKV | None = None, shared: int = 0) -> None:
        """source: take its first ``shared`` tokens over (copied)."""
        self.length, self.filled = length, shared
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        if source is not None and shared:
            for mine, theirs in ((self.keys, source.keys), (self.values, source.values)):
                for tensor in theirs:
                    new = tensor.new_empty(tensor.shape[0], length, tensor.shape[2])
                    new[:, :shared] = tensor[:, :shared]
                    mine.append(new)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.keys, *self.values))

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Put the next rows k, v [N, Hkv, D] of one layer; returns all of them up to there, [1, Hkv, filled + N, D]."""
        stop = self.filled + len(k)
        both = []
        for tensors, new in ((self.keys, k), (self.values, v)):
            if layer == len(tensors):
                tensors.append(new.new_empty(new.shape[1], self.length, new.shape[2]))
            tensors[layer][:, self.filled : stop] = new.transpose(0, 1)
            both.append(tensors[layer][None, :, :stop])
        return both[0], both[1]


class Bank:
    """Rows of one capacity: per layer [rows, Hkv, capacity, D]. ``slots[:count]`` says whose each row is."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.count = 0
        self.slots = np.zeros(0, np.int64)
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    @property
    def used_nbytes(self) -> int:
        rows = max(1, len(self.slots))
        return sum(t.nbytes for t in (*self.keys, *self.values)) * self.count // rows

    def _resize(self, rows: int) -> None:
        for tensors in (self.keys, self.values):
            for layer, old in enumerate(tensors):
                new = old.new_zeros(rows, *old.shape[1:])  # zeros: what is masked must still be finite
                new[: self.count] = old[: self.count]
                tensors[layer] = new
        self.slots = np.concatenate([self.slots[: self.count], np.zeros(rows - self.count, np.int64)])

    def add(self, slots: np.ndarray, keys: list[torch.Tensor], values: list[torch.Tensor], tokens: int) -> np.ndarray:
        """New rows for ``slots``, each starting as a copy of keys, values (per layer [Hkv, >= tokens, D]). Returns the row numbers."""
        n = len(slots)
        if not self.keys:
            for mine, theirs in ((self.keys, keys), (self.values, values)):
                mine.extend(t.new_zeros(0, t.shape[0], self.capacity, t.shape[2]) for t in theirs)
        if self.count + n > len(self.slots):
            self._resize(self.count + n + self.count // 4)
        rows = np.arange(self.count, self.count + n)
        for mine, theirs in ((self.keys, keys), (self.values, values)):
            for to, source in zip(mine, theirs, strict=True):
                to[self.count : self.count + n, :, :tokens] = source[None, :, :tokens]
        self.slots[rows] = slots
        self.count += n
        return rows

    def row(self, row: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Keys and values of one row, per layer [Hkv, capacity, D], as views."""
        return [t[row] for t in self.keys], [t[row] for t in self.values]

    def remove(self, row: int) -> int:
        """Free a row. Returns the slot whose row now is ``row`` (the last one moved there), -1 when none moved."""
        last = self.count - 1
        moved = -1
        if row != last:
            for tensors in (self.keys, self.values):
                for tensor in tensors:
                    tensor[row] = tensor[last]
            moved = self.slots[row] = self.slots[last]
        self.count = last
        if last == 0:
            self.keys, self.values, self.slots = [], [], np.zeros(0, np.int64)
        elif len(self.slots) > 8 and last * 2 <= len(self.slots):
            self._resize(last + last // 4)
        return int(moved)


@dataclass(slots=True, eq=False)
class DecodeRows:
    """One new token for every row of a bank. rows: [count], where each stands in the packed batch; positions: [count] of the new tokens."""

    bank: Bank
    rows: np.ndarray
    positions: np.ndarray
    longest: int  # tokens of the longest row, the new one included
    in_order: bool  # the packed batch is these rows, in this order
    indices: dict[torch.device, torch.Tensor] = field(default_factory=dict)  # of every device that a layer lies on
    masks: dict[tuple[int | None, torch.device], torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, bank: Bank, rows: np.ndarray, positions: np.ndarray, total: int) -> DecodeRows:
        in_order = bank.count == total and bool((rows == np.arange(bank.count)).all())
        return cls(bank, rows, positions, int(positions.max()) + 1, in_order)

    def index(self, device: torch.device) -> torch.Tensor:
        """[3, count] int64: rows, positions, and 0, 1, …"""
        if device not in self.indices:
            self.indices[device] = torch.from_numpy(np.stack([self.rows, self.positions, np.arange(len(self.rows))])).to(device)
        return self.indices[device]

    def mask(self, window: int | None, device: torch.device) -> torch.Tensor:
        """[count, 1, 1, longest] bool, the same for every layer of a window."""
        mask = self.masks.get((window, device))
        if mask is None:
            key_at = torch.arange(self.longest, device=device)
            query_at = self.index(device)[1][:, None, None, None]
            mask = key_at <= query_at
            if window is not None:
                mask &= key_at > query_at - window
            self.masks[window, device] = mask
        return mask

    def attend(self, layer, q, k, v, scale, window, softcap) -> torch.Tensor:
        """q [count, H, D], k and v [count, Hkv, D] in bank order -> [count, H, D]."""
        n, kv_heads, bank = self.bank.count, k.shape[1], self.bank
        _, positions, numbers = self.index(q.device)
        bank.keys[layer][numbers, :, positions] = k
        bank.values[layer][numbers, :, positions] = v
        keys, values = bank.keys[layer][:n, :, : self.longest], bank.values[layer][:n, :, : self.longest]
        q = q.reshape(n, kv_heads, -1, q.shape[-1])  # the query heads of one key head, as if they were rows
        mask = self.mask(window, q.device)
        if softcap is None:
            mask = mask.expand(n, 1, q.shape[2], self.longest)
            return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale).reshape(n, -1, values.shape[-1])
        scores = q @ keys.transpose(2, 3) * (q.shape[-1] ** -0.5 if scale is None else scale)
        scores = (softcap * torch.tanh(scores / softcap)).masked_fill(~mask, float("-inf"))
        return (torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype) @ values).reshape(n, -1, values.shape[-1])


class StepCache:
    """The cache of one forward pass: decode rows of the banks and runs of new prompt rows, side by side (see compute.attention)."""

    def __init__(self, decode: list[DecodeRows], prompts: list[tuple[PromptKV, int, int]]) -> None:
        """prompts: (where it goes, first and last + 1 of its new rows in the packed batch)."""
        self._decode, self._prompts = decode, prompts

    def attend(self, layer, q, k, v, scale, window, softcap) -> torch.Tensor:
        if len(self._decode) == 1 and self._decode[0].in_order:
            return self._decode[0].attend(layer, q, k, v, scale, window, softcap)
        out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
        for part in self._decode:
            rows = part.index(q.device)[0]
            out[rows] = part.attend(layer, q[rows], k[rows], v[rows], scale, window, softcap)
        for prompt, start, stop in self._prompts:
            keys, values = prompt.write(layer, k[start:stop], v[start:stop])
            out[start:stop] = attend(q[None, start:stop].transpose(1, 2), keys, values, scale, window, softcap)[0].transpose(0, 1)
        return out
