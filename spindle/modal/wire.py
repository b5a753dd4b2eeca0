"""What travels between a frontend and a trainer: one HTTP request, one HTTP response, their bodies untouched."""

from __future__ import annotations

import hashlib
from typing import Protocol

import msgspec

from spindle import codec

__all__ = ["Transport", "WireRequest", "WireResponse", "decode_request", "encode", "identify", "route_of"]

FORWARDED = (b"host", b"x-api-key", b"content-type", b"content-encoding", b"accept", b"accept-encoding")
"""Request headers that mean something to a trainer; the others stay at the frontend."""

PROTOBUF = "application/x-protobuf"


class WireRequest(msgspec.Struct, array_like=True):
    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    scheme: str = "https"


class WireResponse(msgspec.Struct, array_like=True):
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class Transport(Protocol):
    """One hop to a trainer and back."""

    async def call(self, request: WireRequest) -> WireResponse: ...


_decoder = msgspec.msgpack.Decoder(WireRequest)


def encode(message: WireRequest | WireResponse) -> bytes:
    """The bytes of the hop: the body as it came, and about two hundred bytes around it."""
    return msgspec.msgpack.encode(message)


def decode_request(data: bytes) -> WireRequest:
    return _decoder.decode(data)


class _Named(msgspec.Struct):
    request_id: str = ""
    model_id: str = ""
    sampling_session_id: str = ""
    session_id: str = ""


_named = msgspec.json.Decoder(_Named)


def identify(method: str, headers: list[tuple[bytes, bytes]], body: bytes) -> str | None:
    """The id that a request is about (of a model, a future, a sampling session or a session), read off its body; None when it names none.

    A protobuf body is peeked at: at most its first 128 KB are inflated, whatever its size. Raises MalformedBody when it cannot be.
    """
    if method != "POST" or not body:
        return None
    kinds = dict(headers)
    if kinds.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip() == PROTOBUF:
        encoding = kinds.get(b"content-encoding")
        return codec.peek(body, encoding.decode("latin-1") if encoding else None)[0]
    if len(body) > 1 << 20:
        return None
    try:
        named = _named.decode(body)
    except msgspec.MsgspecError:
        return None
    return named.request_id or named.model_id or named.sampling_session_id or named.session_id or None


def route_of(api_key: bytes, count: int) -> int:
    """Which of ``count`` trainers everything of a key lives on. Every frontend computes the same, and asks nobody."""
    if count == 1:
        return 0
    return int.from_bytes(hashlib.blake2b(api_key, digest_size=8).digest()) % count
