"""The frontend: an ASGI application that passes whole requests on to a trainer, one hop each, and their answers back."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from spindle.errors import MalformedBody
from spindle.modal.wire import (
    FORWARDED,
    Transport,
    WireRequest,
    WireResponse,
    identify,
    read_request,
    refusal,
    route_of,
    send_response,
)

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
                await send_response(response, send)

    async def _answer(self, scope: dict[str, Any], receive: Any) -> WireResponse | None:
        if scope["path"] == HEALTH:  # of this container; a trainer need not wake for it
            return WireResponse(200, [(b"content-type", b"application/json")], b'{"status":"ok"}')
        request = await read_request(scope, receive, self.max_body_bytes, FORWARDED)
        if not isinstance(request, WireRequest):
            return request
        try:
            subject = identify(request.method, request.headers, request.body)
        except MalformedBody as error:
            return refusal(400, str(error))
        route = route_of(dict(request.headers).get(b"x-api-key", b""), len(self.trainers))
        self.hops += 1
        self.hop_bytes += len(request.body)
        try:
            return await self.trainers[route].call(request)
        except Exception as error:
            log.exception("no answer from trainer %d about %s", route, subject)
            return refusal(503, f"the trainer gave no answer ({type(error).__name__}); it is starting, or was moved: try again", "server")


async def _lifespan(receive: Any, send: Any) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
