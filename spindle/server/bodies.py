"""Request bodies: read within bounds, decoded from JSON with errors that name the field."""

from __future__ import annotations

import asyncio
import functools
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from spindle.errors import InvalidRequest, MalformedBody

__all__ = ["Strict", "decode", "read_body"]

T = TypeVar("T")
DRAIN_FACTOR = 4  # an over-long body is read on (and thrown away) to this many times the limit, so that its sender sees the answer


class Strict(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A request that changes something: a field we do not know is an error, never ignored."""


async def read_body(request: Request, limit: int, idle_timeout_s: float) -> bytes:
    """The whole body. Raises MalformedBody past ``limit`` bytes, or when nothing arrives for ``idle_timeout_s``."""
    declared = request.headers.get("content-length", "")
    too_long = declared.isdigit() and int(declared) > limit
    parts: list[bytes] = []
    size = 0
    stream = request.stream()
    try:
        while True:
            async with asyncio.timeout(idle_timeout_s):
                part = await anext(stream, None)
            if part is None:
                break
            size += len(part)
            too_long = too_long or size > limit
            if too_long:
                parts.clear()
                if size > DRAIN_FACTOR * limit:
                    break
            elif part:
                parts.append(part)
    except TimeoutError:
        raise MalformedBody(f"the body stopped arriving after {size} bytes: nothing came for {idle_timeout_s:g} s") from None
    except ClientDisconnect:
        raise MalformedBody(f"the connection closed after {size} bytes of the body") from None
    if too_long:
        raise MalformedBody(f"the body has {declared or f'more than {limit}'} bytes, at most {limit} are allowed")
    return parts[0] if len(parts) == 1 else b"".join(parts)


@functools.cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def decode(kind: type[T], body: bytes) -> T:
    """Raises MalformedBody when it is not JSON, InvalidRequest naming the field when it is not a ``kind``."""
    try:
        return _decoder(kind).decode(body)  # type: ignore[arg-type]
    except msgspec.ValidationError as error:
        raise InvalidRequest(str(error)) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise MalformedBody(f"the body is not JSON: {error}") from None


def as_json_object(body: bytes) -> dict[str, Any]:
    value = decode(dict, body)
    return value
