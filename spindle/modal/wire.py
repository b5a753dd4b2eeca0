"""What travels between a frontend and a trainer: one HTTP request, one HTTP response, their bodies untouched."""

from __future__ import annotations

import hashlib
from collections.abc import Container
from typing import Any, Protocol

import msgspec

from spindle import codec

__all__ = [
    "FORWARDED",
    "Transport",
    "WireRequest",
    "WireResponse",
    "decode_request",
    "encode",
    "identify",
    "read_request",
    "refusal",
    "route_of",
    "send_response",
]

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


def refusal(status: int, text: str, category: str = "user") -> WireResponse:
    """An error as clients read it."""
    return WireResponse(status, [(b"content-type", b"application/json")], msgspec.json.encode({"error": text, "category": category}))


async def read_request(
    scope: dict[str, Any], receive: Any, max_body_bytes: int, kept: Container[bytes] | None = None
) -> WireRequest | WireResponse | None:
    """One ASGI request, whole, with the headers ``kept`` (None: all). Its refusal when it is too large, None when the client went away."""
    chunks, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        if size > max_body_bytes:
            return refusal(413, f"the body is over {max_body_bytes} bytes, the most of one request: send fewer datums at a time")
        more = message.get("more_body", False)
    headers = [(name, value) for name, value in scope["headers"] if kept is None or name in kept]
    body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
    return WireRequest(scope["method"], scope["path"], scope.get("query_string", b""), headers, body, scope.get("scheme", "https"))


async def send_response(response: WireResponse, send: Any) -> None:
    """A response over ASGI."""
    await send({"type": "http.response.start", "status": response.status, "headers": response.headers})
    await send({"type": "http.response.body", "body": response.body})


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
