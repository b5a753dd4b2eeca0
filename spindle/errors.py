"""One tree of errors. Every message names the field, what came, and what is allowed.

``category`` is what a Tinker client sees in a failed future: ``"user"`` when the caller can mend the
request, ``"server"`` when only the operator can.
"""

from __future__ import annotations

from typing import TypeVar

__all__ = [
    "Cancelled",
    "Conflict",
    "EngineClosed",
    "InvalidRequest",
    "MalformedBody",
    "NotFound",
    "Overloaded",
    "ServerError",
    "SpindleError",
    "UserError",
    "without_frames",
]


E = TypeVar("E", bound=BaseException)


class SpindleError(Exception):
    """Base of every error that Spindle raises on purpose."""

    category: str = "server"
    http_status: int = 500


class UserError(SpindleError, ValueError):
    """The request is wrong and will stay wrong when it is sent again."""

    category = "user"
    http_status = 400


class MalformedBody(UserError):
    """The body is not a readable request at all: bad zstd, bad protobuf, over a byte limit."""


class InvalidRequest(UserError):
    """A readable request that says something impossible.

    ``model_id`` and ``seq_id`` are what the body named (``None`` and 0 when it named none): a rejected
    request still takes its place in its adapter's order, so that those after it run.
    """

    def __init__(self, message: str, model_id: str | None = None, seq_id: int = 0) -> None:
        super().__init__(message)
        self.model_id = model_id
        self.seq_id = seq_id


class NotFound(UserError):
    """The named adapter, session, checkpoint or future does not exist (or is not the caller's)."""

    http_status = 404


class Conflict(UserError):
    """The same (adapter, seq_id) came before with different content. Still a 400: a Tinker client
    retries 409 for five minutes."""


class Overloaded(SpindleError):
    """A bound on queued work is reached; try again later."""

    http_status = 429

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Cancelled(SpindleError):
    """The request was cancelled before it started."""

    category = "user"
    http_status = 410


class EngineClosed(SpindleError):
    """The engine was closed before the request could run."""

    http_status = 503


class ServerError(SpindleError):
    """Something failed on our side while the request ran; the adapter is as it was before it."""


def without_frames(error: E) -> E:
    """The error without its tracebacks, nor those of its causes: a future that keeps it would keep whole request bodies through them."""
    one: BaseException | None = error
    while one is not None and one.__traceback__ is not None:
        one.__traceback__ = None
        one = one.__cause__ or one.__context__
    return error
