"""``tinker://<run id>/<kind>/<name>`` paths and the names allowed in them."""

from __future__ import annotations

import re
from typing import NamedTuple

from spindle.errors import InvalidRequest

__all__ = ["KINDS", "TinkerPath", "check_name", "check_ttl", "parse_path"]

KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
"""Path segment -> checkpoint type as the REST API calls it."""

MIN_TTL_S, MAX_TTL_S = 3600, 10 * 366 * 24 * 3600

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_PATH_HINT = "expected tinker://<training run id>/<weights | sampler_weights | external_weights>/<name>"


class TinkerPath(NamedTuple):
    run_id: str
    kind: str
    name: str

    def __str__(self) -> str:
        return f"tinker://{self.run_id}/{self.kind}/{self.name}"

    @property
    def checkpoint_id(self) -> str:
        return f"{self.kind}/{self.name}"


def parse_path(text: str) -> TinkerPath:
    """Raises InvalidRequest saying what a path looks like."""
    parts = text.removeprefix("tinker://").split("/")
    if not text.startswith("tinker://") or len(parts) != 3 or not all(parts):
        raise InvalidRequest(f"path {text[:200]!r} is not a checkpoint path: {_PATH_HINT}")
    if parts[1] not in KINDS:
        raise InvalidRequest(f"path {text[:200]!r} names the unknown kind {parts[1]!r}: {_PATH_HINT}")
    return TinkerPath(*parts)


def check_name(name: str) -> str:
    """A checkpoint's name, or InvalidRequest saying what is allowed."""
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"checkpoint name {name[:200]!r} is not allowed: 1 to 128 letters, digits, '.', '_' or '-', not starting with '.' or '-'"
        )
    return name


def check_ttl(ttl_seconds: int | None) -> int | None:
    if ttl_seconds is not None and not MIN_TTL_S <= ttl_seconds <= MAX_TTL_S:
        raise InvalidRequest(f"ttl_seconds is {ttl_seconds}, allowed is {MIN_TTL_S} (1 hour) to {MAX_TTL_S} (10 years), or null for never")
    return ttl_seconds
