"""Responses: JSON, and errors as a Tinker client must see them.

A client retries 408, 409, 429 and 5xx for minutes and takes every other 4xx as final, so a user's mistake is
never one of the former.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from starlette.responses import Response

from spindle.errors import Overloaded, SpindleError

__all__ = ["PROTOBUF", "encode_json", "error_response", "json_response"]

PROTOBUF = "application/x-protobuf"
JSON = "application/json"
log = logging.getLogger("spindle.server")
_encoder = msgspec.json.Encoder()


def encode_json(value: Any) -> bytes:
    return _encoder.encode(value)


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(_encoder.encode(value), status, headers, JSON)


def describe(error: BaseException) -> dict[str, str]:
    """What a client is told of an error: its text, and whether the caller ("user") or the operator ("server") can mend it."""
    if isinstance(error, SpindleError):
        return {"error": str(error), "category": error.category}
    return {"error": f"internal error: {type(error).__name__}; the server's log has the details", "category": "server"}


def error_response(error: BaseException) -> Response:
    if not isinstance(error, SpindleError):
        log.error("unexpected error", exc_info=error)
        return json_response(describe(error), 500)
    headers = {"Retry-After": str(max(1, round(error.retry_after_s)))} if isinstance(error, Overloaded) else None
    return json_response(describe(error), error.http_status, headers)
