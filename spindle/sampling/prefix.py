"""Prompts whose keys and values are kept, found again by their first tokens."""

from __future__ import annotations

import hashlib
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

import numpy as np

from spindle.sampling.kv import PromptKV

BLOCK = 16  # tokens; a shorter match is not looked for


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """How many leading tokens are equal."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if differ.size else n


@dataclass(slots=True, eq=False)
class _Entry:
    snapshot: Callable[[], object]  # None once it is gone: then nobody can ask for the entry, and its id may be another's
    tokens: np.ndarray  # [n] int64
    kv: PromptKV
    digests: list[tuple[Hashable, bytes]]


class PrefixStore:
    """Least recently used prompts go first when their keys and values are more than ``max_bytes``.

    An entry is found by a chained digest at each block of its tokens; the tokens themselves are compared before it is used.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._nbytes = 0
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self._index: dict[tuple[Hashable, bytes], _Entry] = {}
        self._gone: list[object] = []  # the references of entries whose snapshot is gone

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, snapshot: object, tokens: np.ndarray, limit: int) -> tuple[PromptKV | None, int]:
        """The entry that shares the longest prefix with ``tokens`` under the same snapshot, and how much of it, up to ``limit`` tokens."""
        for digest in reversed(list(_digests(snapshot, tokens[:limit]))):
            entry = self._index.get(digest)
            if entry is not None and entry.snapshot() is snapshot:
                shared = min(common_prefix(entry.tokens, tokens), limit)
                if shared >= BLOCK:
                    self._entries.move_to_end(id(entry))
                    return entry.kv, shared
        return None, 0

    def put(self, snapshot: object, tokens: np.ndarray, kv: PromptKV) -> None:
        """Keep a prompt. Entries that are a prefix of it go; kv must not change any more."""
        self._drop_gone()
        if len(tokens) < BLOCK or kv.nbytes > self.max_bytes:
            return
        alive = (lambda: None) if snapshot is None else weakref.ref(snapshot, self._gone.append)
        entry = _Entry(alive, tokens, kv, list(_digests(snapshot, tokens)))
        longest = self._index.get(entry.digests[-1])
        if longest is not None and common_prefix(longest.tokens, tokens) == len(tokens):
            self._entries.move_to_end(id(longest))
            return
        for old in {id(e): e for d in entry.digests if (e := self._index.get(d)) is not None}.values():
            if common_prefix(old.tokens, tokens) == len(old.tokens):
                self._remove(old)
        self._entries[id(entry)] = entry
        self._nbytes += kv.nbytes
        for digest in entry.digests:
            self._index[digest] = entry
        self.shrink(self.max_bytes)

    def shrink(self, max_bytes: int) -> None:
        """Drop the least recently used until at most ``max_bytes`` are held."""
        while self._nbytes > max_bytes and self._entries:
            self._remove(next(iter(self._entries.values())))

    def forget(self, snapshot: object) -> None:
        """Drop what belongs to a snapshot."""
        for entry in [e for e in self._entries.values() if e.snapshot() is snapshot]:
            self._remove(entry)

    def _drop_gone(self) -> None:
        """Drop what belongs to snapshots that nobody holds any more."""
        if self._gone:
            gone = set(map(id, self._gone))
            self._gone.clear()
            for entry in [e for e in self._entries.values() if id(e.snapshot) in gone]:
                self._remove(entry)

    def _remove(self, entry: _Entry) -> None:
        del self._entries[id(entry)]
        self._nbytes -= entry.kv.nbytes
        for digest in entry.digests:
            if self._index.get(digest) is entry:
                del self._index[digest]


def _digests(snapshot: object, tokens: np.ndarray) -> Iterator[tuple[Hashable, bytes]]:
    chain = hashlib.blake2b(digest_size=16)
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        chain.update(tokens[start : start + BLOCK].tobytes())
        yield id(snapshot), chain.copy().digest()
