"""Request bodies: read within bounds, decoded from JSON with errors that name the field."""

from __future__ import annotations

import asyncio
import functools
import time
from typing import Any, TypeVar

import msgspec
import numpy as np
from starlette.requests import ClientDisconnect, Request

from spindle.errors import InvalidRequest, MalformedBody, Overloaded

__all__ = ["Receiving", "Reservation", "Strict", "decode", "numbers", "read_body"]

T = TypeVar("T")
SLICE_BYTES = 64 << 10  # of a JSON array, decoded at once
LARGE_BYTES = 1 << 20  # a body that declares as much is written where it will stay as it comes; others are joined at their end
SLOWEST = 4096  # bytes a second on average, after a first wait of the idle timeout: a trickle may not hold its room for ever
DRAIN_FACTOR = 4  # an over-long body is read on (and thrown away) to this many times the limit, so that its sender sees the answer


class Strict(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A request that changes something: a field we do not know is an error, never ignored."""


class Receiving:
    """The bytes of all bodies that are being received or decoded now: at most ``limit``, though one body alone may always come.

    Bodies up to ``small`` bytes are counted but never refused, so that heartbeats and polls get through beside many uploads.
    """

    def __init__(self, limit: int, small: int) -> None:
        self.limit = limit
        self.small = small
        self.nbytes = 0


class Reservation:
    """One body's share of ``Receiving``; give it back with ``release``."""

    def __init__(self, receiving: Receiving) -> None:
        self._receiving = receiving
        self._nbytes = 0

    def grow(self, nbytes: int) -> None:
        """The body has (or will have) at least ``nbytes`` in all. Raises Overloaded when there is no room for them."""
        more, others = nbytes - self._nbytes, self._receiving.nbytes - self._nbytes
        if more <= 0:
            return
        if nbytes > self._receiving.small and others and others + nbytes > self._receiving.limit:
            raise Overloaded(
                f"{others} bytes of other requests are being received and this one has {nbytes}; at most {self._receiving.limit} may be "
                "at the same time; try again later"
            )
        self._nbytes = nbytes
        self._receiving.nbytes += more

    def release(self) -> None:
        self._receiving.nbytes -= self._nbytes
        self._nbytes = 0


async def read_body(request: Request, limit: int, idle_timeout_s: float, room: Reservation) -> bytes | memoryview:
    """The whole body. Raises MalformedBody past ``limit`` bytes, or when nothing arrives for ``idle_timeout_s`` or hardly anything for
    longer; Overloaded, before anything is read when the length is declared, when ``room`` has none for it."""
    declared = request.headers.get("content-length", "")
    too_long = declared.isdigit() and int(declared) > limit
    whole: np.ndarray | None = None
    if declared.isdigit() and not too_long:
        room.grow(int(declared))
        if int(declared) >= LARGE_BYTES:
            whole = np.empty(int(declared), np.uint8)  # memory is taken as it is written to; numpy asks for huge pages
    parts: list[bytes] = []
    size, began = 0, time.monotonic()
    stream = request.stream()
    try:
        while True:
            async with asyncio.timeout(idle_timeout_s):
                part = await anext(stream, None)
            if part is None:
                break
            size += len(part)
            if time.monotonic() - began > idle_timeout_s + size / SLOWEST:
                raise MalformedBody(f"the body arrives too slowly: {size} bytes so far; {SLOWEST} bytes a second are needed")
            too_long = too_long or size > (limit if whole is None else len(whole))
            if too_long:
                parts.clear()
                if size > DRAIN_FACTOR * limit:
                    break
            elif whole is not None:
                whole[size - len(part) : size] = np.frombuffer(part, np.uint8)
            elif part:
                room.grow(size)
                parts.append(part)
    except TimeoutError:
        raise MalformedBody(f"the body stopped arriving after {size} bytes: nothing came for {idle_timeout_s:g} s") from None
    except ClientDisconnect:
        raise MalformedBody(f"the connection closed after {size} bytes of the body") from None
    if too_long:
        raise MalformedBody(f"the body has {declared or f'more than {limit}'} bytes, at most {limit} are allowed")
    if whole is not None:
        return whole[:size].data
    return parts[0] if len(parts) == 1 else b"".join(parts)


@functools.cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def decode(kind: type[T], body: bytes | memoryview) -> T:
    """Raises MalformedBody when it is not JSON, InvalidRequest naming the field when it is not a ``kind``."""
    try:
        return _decoder(kind).decode(body)  # type: ignore[arg-type]
    except msgspec.ValidationError as error:
        raise InvalidRequest(str(error)) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise MalformedBody(f"the body is not JSON: {error}") from None


def numbers(array: msgspec.Raw, name: str, dtype: type) -> np.ndarray:
    """[n] of ``dtype`` from a JSON array of numbers; ``int`` allows no fractions.

    A slice at a time: a decoder keeps the interpreter to itself, so one call over a long array would hold up every other thread, and its
    list would be many times as large. Raises InvalidRequest naming ``name``; OverflowError when a number does not fit.
    """
    kind: Any = list[int] if dtype is int else list[int | float]
    text = memoryview(array)
    parts: list[np.ndarray] = []
    start = 0
    try:
        while len(text) - start > SLICE_BYTES:
            piece = bytes(text[start : start + SLICE_BYTES])
            comma = piece.rfind(b",")
            if comma < 0:  # no number is that long
                raise msgspec.DecodeError
            parts.append(np.array(_decoder(kind).decode((b"[" if start else b"") + piece[:comma] + b"]"), dtype))
            start += comma + 1
        parts.append(np.array(_decoder(kind).decode((b"[" if start else b"") + bytes(text[start:])), dtype))
    except msgspec.MsgspecError:  # not a flat array of such numbers: the whole of it says where
        try:
            return np.array(_decoder(kind).decode(array), dtype)
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"{name}: {error}") from None
        except msgspec.DecodeError as error:
            raise MalformedBody(f"the body is not JSON: {error}") from None
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
