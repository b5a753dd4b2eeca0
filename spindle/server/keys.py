"""API keys: who is calling. Every key has an owner's name; each owner sees only its own things."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping

from spindle.errors import InvalidRequest

__all__ = ["LOCAL_OWNER", "Keys", "is_loopback"]

LOCAL_OWNER = "local"
"""The one owner of a server without keys."""


def is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class Keys:
    """``keys``: {owner: key}, or keys alone or as "owner=key" (then the owner is "key-" and a digest of the key).

    Every key must begin with "tml-": the SDK refuses others. Raises InvalidRequest.
    """

    def __init__(self, keys: Mapping[str, str] | Iterable[str] | None) -> None:
        pairs = list(keys.items()) if isinstance(keys, Mapping) else [self._named(key) for key in keys or ()]
        for owner, key in pairs:
            if not key.startswith("tml-") or len(key) < 8:
                raise InvalidRequest(f'the key of {owner!r} must begin with "tml-" and have 8 characters or more')
        if len({owner for owner, _ in pairs}) != len(pairs):
            raise InvalidRequest("two API keys have the same owner's name")
        self._owners = [(owner, _digest(key)) for owner, key in pairs]

    @staticmethod
    def _named(text: str) -> tuple[str, str]:
        owner, equals, key = text.partition("=")
        return (owner, key) if equals and not owner.startswith("tml-") else ("key-" + _digest(text).hex()[:8], text)

    def __bool__(self) -> bool:
        return bool(self._owners)

    def owner(self, key: str | None) -> str | None:
        """Whose key it is, or None. Takes the same time whatever the key is."""
        if not self._owners:
            return LOCAL_OWNER
        offered = _digest(key or "")
        found = None
        for owner, digest in self._owners:
            if hmac.compare_digest(offered, digest):
                found = owner
        return found if key else None
