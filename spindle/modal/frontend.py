"""The frontend: an ASGI application that passes whole requests on to a trainer, one hop each, and their answers back."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import msgspec

from spindle.errors import MalformedBody
from spindle.modal.wire import FORWARDED, Transport, WireRequest, WireResponse, identify, route_of

__all__ = ["Frontend"]

log = logging.getLogger("spindle.modal")

HEALTH = "/api/v1/healthz"


class Frontend:
    """trainers: one transport per trainer. max_body_bytes: of a request; larger ones are refused before they travel.

    hops counts the calls made to trainers, hop_bytes the request bodies in them.
    """

    def __init__(self, trainers: Sequence[Transport], max_body_bytes: int = 64 << 20) -> None:
        self.trainers = list(trainers)
        self.max_body_bytes = max_body_bytes
        self.hops = 0
        self.hop_bytes = 0

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "http":
            response = await self._answer(scope, receive)
            if response is not None:
                await send({"type": "http.response.start", "status": response.status, "headers": response.headers})
                await send({"type": "http.response.body", "body": response.body})

    async def _answer(self, scope: dict[str, Any], receive: Any) -> WireResponse | None:
        if scope["path"] == HEALTH:  # of this container; a trainer need not wake for it
            return WireResponse(200, [(b"content-type", b"application/json")], b'{"status":"ok"}')
        headers = [(name, value) for name, value in scope["headers"] if name in FORWARDED]
        chunks, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            if size > self.max_body_bytes:
                return _refusal(413, f"the body is over {self.max_body_bytes} bytes, the most of one request: send fewer datums at a time")
            if not message.get("more_body"):
                break
        request = WireRequest(
            scope["method"], scope["path"], scope.get("query_string", b""), headers, b"".join(chunks), scope.get("scheme", "https")
        )
        try:
            subject = identify(request.method, headers, request.body)
        except MalformedBody as error:
            return _refusal(400, str(error))
        route = route_of(dict(headers).get(b"x-api-key", b""), len(self.trainers))
        self.hops += 1
        self.hop_bytes += len(request.body)
        try:
            return await self.trainers[route].call(request)
        except Exception as error:
            log.exception("no answer from trainer %d about %s", route, subject)
            return _refusal(503, f"the trainer gave no answer ({type(error).__name__}); it is starting, or was moved: try again", "server")


def _refusal(status: int, text: str, category: str = "user") -> WireResponse:
    return WireResponse(status, [(b"content-type", b"application/json")], msgspec.json.encode({"error": text, "category": category}))


async def _lifespan(receive: Any, send: Any) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
