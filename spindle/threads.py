"""Ending threads within a bound."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

__all__ = ["join_all"]


def join_all(threads: Iterable[threading.Thread], timeout_s: float) -> bool:
    """Wait for all of them, ``timeout_s`` in all. False when one did not end in time."""
    threads, deadline = list(threads), time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)
