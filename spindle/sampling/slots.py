"""The running samples as columns: one slot per sample, so that a step handles all of them with array operations."""

from __future__ import annotations

from typing import Any

import numpy as np

from spindle.sampling.request import Checked

_COLUMNS = {
    "token": np.int64,  # sampled last, not yet fed
    "position": np.int64,  # where it will be fed
    "count": np.int64,  # sampled so far
    "limit": np.int64,
    "seed": np.uint64,
    "sample": np.int64,  # which sample of its request
    "temperature": np.float32,
    "top_k": np.int64,
    "top_p": np.float64,
    "topk": np.int64,  # width of the top-k rows asked for
    "plain": np.bool_,  # neither stop strings nor top-k rows
    "capacity": np.int64,  # of the bank it lies in, 0 = in none
    "row": np.int64,  # in that bank
    "age": np.int64,  # order of admission
}


class Slots:
    token: np.ndarray
    position: np.ndarray
    count: np.ndarray
    limit: np.ndarray
    seed: np.ndarray
    sample: np.ndarray
    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    topk: np.ndarray
    plain: np.ndarray
    capacity: np.ndarray
    row: np.ndarray
    age: np.ndarray

    def __init__(self) -> None:
        for name, dtype in _COLUMNS.items():
            setattr(self, name, np.zeros(0, dtype))
        self.stop_ids = np.full((0, 1), -1, np.int64)  # [slots, widest], -1 = none
        self.tokens = np.zeros((0, 16), np.int32)  # [slots, longest so far]
        self.logprobs = np.zeros((0, 16), np.float32)
        self.owner: list[Any] = []
        self.matcher: list[Any] = []
        self.topk_rows: list[list[tuple[np.ndarray, np.ndarray]]] = []
        self._free: list[int] = []
        self._age = 0

    def __len__(self) -> int:
        """Slots in use."""
        return len(self.owner) - len(self._free)

    def take(self, owner: Any, checked: Checked, samples: np.ndarray) -> np.ndarray:
        """Slots for the given samples of one request, at the end of its prompt."""
        n = len(samples)
        if len(self._free) < n:
            self._grow(max(n - len(self._free), len(self.owner), 16))
        slots = np.array([self._free.pop() for _ in range(n)], np.int64)
        width = len(checked.stop_ids)
        if width > self.stop_ids.shape[1]:
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, width - self.stop_ids.shape[1])), constant_values=-1)
        self.stop_ids[slots] = -1
        self.stop_ids[slots, :width] = checked.stop_ids
        self.position[slots] = len(checked.prompt) - 1
        self.count[slots] = self.capacity[slots] = 0
        self.limit[slots] = checked.max_tokens
        self.seed[slots], self.sample[slots] = np.uint64(checked.seed), samples
        self.temperature[slots], self.top_k[slots], self.top_p[slots] = checked.temperature, checked.top_k, checked.top_p
        self.topk[slots] = checked.request.topk_sample_logprobs
        self.plain[slots] = not checked.stop_strings and not checked.request.topk_sample_logprobs
        self._age += 1
        self.age[slots] = self._age
        for slot in slots:
            self.owner[slot], self.topk_rows[slot] = owner, []
        return slots

    def give(self, slot: int) -> None:
        self.owner[slot] = self.matcher[slot] = None
        self.topk_rows[slot] = []
        self.capacity[slot] = 0
        self._free.append(slot)

    def push(self, slots: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray) -> np.ndarray:
        """Take one sampled token for each slot. Returns [n] bool: it is one of the slot's stop tokens."""
        at = self.count[slots]
        if at.max() >= self.tokens.shape[1]:
            wider = ((0, 0), (0, self.tokens.shape[1]))
            self.tokens, self.logprobs = np.pad(self.tokens, wider), np.pad(self.logprobs, wider)
        self.tokens[slots, at] = tokens
        self.logprobs[slots, at] = logprobs
        self.token[slots] = tokens
        self.count[slots] += 1
        self.position[slots] += 1
        return (self.stop_ids[slots] == tokens[:, None]).any(1)

    def _grow(self, n: int) -> None:
        first = len(self.owner)
        for name in _COLUMNS:
            setattr(self, name, np.concatenate([getattr(self, name), np.zeros(n, _COLUMNS[name])]))
        for name in ("stop_ids", "tokens", "logprobs"):
            setattr(self, name, np.pad(getattr(self, name), ((0, n), (0, 0))))
        self.owner += [None] * n
        self.matcher += [None] * n
        self.topk_rows += [[] for _ in range(n)]
        self._free += range(first + n - 1, first - 1, -1)
