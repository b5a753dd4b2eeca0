"""Stop strings, matched on decoded text across token borders, one token at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

_CONTEXT = 6  # prompt tokens decoded in front, so that the first sampled token is not decoded as the start of a text


class Tokenizer(Protocol):
    def decode(self, token_ids: Sequence[int], **options: Any) -> str: ...


class StopMatcher:
    """The decoded text of one sample, as far as it can still take part in a match.

    Text that ends inside a character is held back until the character is whole. Special tokens count as text.
    """

    __slots__ = ("_ids", "_keep", "_known", "_stops", "_tail", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...], prompt: np.ndarray) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._keep = max(map(len, stops)) - 1
        self._ids: list[int] = prompt[-_CONTEXT:].tolist()  # a short window, not the whole sample
        self._known = len(self._ids)  # how many of _ids are in the text already
        self._tail = ""

    def push(self, token: int) -> bool:
        """Take one sampled token; True when a stop string is complete with it."""
        self._ids.append(token)
        before = self._decode(self._ids[: self._known])
        text = self._decode(self._ids)
        if text.endswith("\ufffd") and len(self._ids) - self._known < 16:  # a character has at most a few tokens: longer is not one
            whole = self._tail + text[len(before) :].rstrip("\ufffd")
            return any(stop in whole for stop in self._stops)
        self._tail += text[len(before) :]
        self._ids = self._ids[max(0, self._known - _CONTEXT) :] if self._known > 4 * _CONTEXT else self._ids
        self._known = len(self._ids)
        found = any(stop in self._tail for stop in self._stops)
        self._tail = self._tail[max(0, len(self._tail) - self._keep) :] if self._keep else ""
        return found

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
