"""Every setting of the server, with its unit in its name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from spindle.losses import CustomLimits

__all__ = ["EXTERNAL_FORMATS", "ServerSettings"]

EXTERNAL_FORMATS = ("adapter", "merged")


def _receiving_bytes() -> int:
    """4 GiB, or a quarter of this machine's memory when that is less."""
    return min(4 << 30, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4)


@dataclass(frozen=True)
class ServerSettings:
    """Bounds and waits of one server. ``client_config`` overrides single flags of what clients are told (see ``client.py``)."""

    long_poll_s: float = 25.0  # the SDK gives a poll up at 45 s
    session_timeout_s: float = 600.0  # without a heartbeat (the SDK sends one every 10 s)
    max_body_bytes: int = 64 << 20
    max_json_bytes: int = 32 << 20  # of requests with tensors or prompts in JSON
    max_plain_json_bytes: int = 2 << 20  # of the others
    max_receiving_bytes: int = field(default_factory=_receiving_bytes)  # of all bodies that arrive or are decoded at the same time
    body_idle_timeout_s: float = 30.0
    header_timeout_s: float = 15.0
    max_header_bytes: int = 64 << 10
    inline_scan_bytes: int = 64 << 10  # bigger bodies are scanned or decoded in a thread
    inline_payload_bytes: int = 16 << 20  # bigger answers are announced by size first, when the client allows it
    max_pending_futures: int = 200_000
    max_kept_futures: int = 100_000  # answered ones
    max_kept_bytes: int = 1 << 30  # of answers
    max_snapshot_bytes: int = 16 << 30  # of published weights that have no name
    scan_threads: int = 4
    io_threads: int = 4
    external_format: str = "adapter"  # of save_weights_external where the request does not say; or "merged"
    tokenizer_id: str | None = None  # what training clients load their tokenizer from; None: the base model's name
    custom_losses: CustomLimits = field(default_factory=CustomLimits)
    client_config: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, int | float) and not value > 0:
                raise ValueError(f"{name} must be positive, got {value}")
        if self.external_format not in EXTERNAL_FORMATS:
            raise ValueError(f"external_format is {self.external_format!r}, allowed: {', '.join(EXTERNAL_FORMATS)}")
        if self.long_poll_s > 30:
            raise ValueError(f"long_poll_s must be at most 30 (clients give a poll up at 45 s), got {self.long_poll_s}")
