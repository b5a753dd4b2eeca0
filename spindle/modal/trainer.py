"""The trainer: one engine and the whole REST API in one container, reached over HTTP or by one call of a frontend."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from spindle.errors import MalformedBody, ServerError
from spindle.modal.wire import WireRequest, WireResponse, identify, read_request, send_response
from spindle.server import ServerSettings, create_app

__all__ = ["Trainer"]

log = logging.getLogger("spindle.modal")

SAVES = ("/save_weights", "/save_weights_for_sampler", "/save_weights_external", "/copy_weights")
COMPRESS_FROM_BYTES = 16 << 10
PROBE_BYTES = 64 << 10


class Trainer:
    """make_engine: makes the engine; ``stop`` closes it. store: a directory on the volume. commit: makes what was written there last.

    A checkpoint is committed before its client hears that it was saved. cold_start: the seconds that each part of starting took.
    """

    def __init__(
        self,
        make_engine: Callable[[], Any],
        store: str | Path,
        api_keys: list[str],
        commit: Callable[[], None] = lambda: None,
        settings: ServerSettings | None = None,
        name: str | None = None,
    ) -> None:
        if not api_keys:
            raise ServerError(
                "no API keys: one of the recipe's auth.secrets must set SPINDLE_API_KEYS to tml-…, several with commas between"
            )
        self.commit = commit
        began = time.monotonic()
        self.engine = make_engine()
        self.cold_start = {"engine_s": time.monotonic() - began}
        self.started_at = time.time()
        settings = settings or ServerSettings()
        self._app = create_app(self.engine, store, api_keys, name, settings=settings)
        self.max_body_bytes = settings.max_body_bytes
        self._unsaved: set[str] = set()
        self._lifespan = contextlib.AsyncExitStack()
        self.calls = 0

    async def start(self) -> None:
        began = time.monotonic()
        await self._lifespan.enter_async_context(self._app.router.lifespan_context(self._app))
        self.cold_start["server_s"] = time.monotonic() - began
        log.warning("cold start: %s", ", ".join(f"{part} {seconds:.1f}" for part, seconds in self.cold_start.items()))

    async def stop(self) -> None:
        """Finish what runs, end sessions, close the store, commit it."""
        await self._lifespan.aclose()
        await asyncio.to_thread(self.engine.close)
        await asyncio.to_thread(self.commit)

    async def call(self, request: WireRequest) -> WireResponse:
        """Answer one forwarded request. This is the whole interface of a frontend."""
        self.calls += 1
        response = await self._through_app(request)
        body = await self._after(request, response)
        headers = [(name, value) for name, value in response.headers if name != b"content-length"]
        accepts = dict(request.headers).get(b"accept-encoding", b"")
        if len(body) >= COMPRESS_FROM_BYTES and b"gzip" in accepts and b"content-encoding" not in dict(headers):
            smaller = await asyncio.to_thread(compressed, body)
            if smaller is not None:
                body = smaller
                headers.append((b"content-encoding", b"gzip"))
        headers.append((b"content-length", str(len(body)).encode()))
        return WireResponse(response.status, headers, body)

    async def asgi(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """The same over HTTP, for a trainer that is its own frontend."""
        if scope["type"] != "http":
            return
        request = await read_request(scope, receive, self.max_body_bytes)
        response = await self.call(request) if isinstance(request, WireRequest) else request
        if response is not None:
            await send_response(response, send)

    async def _through_app(self, request: WireRequest) -> WireResponse:
        host = next((value for name, value in request.headers if name == b"host"), b"trainer")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": request.method,
            "scheme": request.scheme,
            "path": request.path,
            "raw_path": request.path.encode(),
            "query_string": request.query,
            "root_path": "",
            "headers": [*request.headers, (b"content-length", str(len(request.body)).encode())]
            if b"content-length" not in dict(request.headers)
            else request.headers,
            "client": None,
            "server": (host.decode("latin-1"), None),
        }
        sent = False
        status, headers, chunks = 500, [], []

        async def receive() -> dict[str, Any]:
            nonlocal sent
            if sent:
                await asyncio.Event().wait()
            sent = True
            return {"type": "http.request", "body": request.body, "more_body": False}

        async def send(message: Any) -> None:
            nonlocal status, headers
            if message["type"] == "http.response.start":
                status, headers = message["status"], list(message.get("headers", []))
            else:
                chunks.append(message.get("body", b""))

        await self._app(scope, receive, send)
        return WireResponse(status, headers, chunks[0] if len(chunks) == 1 else b"".join(chunks))

    async def _after(self, request: WireRequest, response: WireResponse) -> bytes:
        """Commit what the answer says was saved; say what a 404 after the loss of a container means."""
        if response.status == 404:
            return self._lost(request, response)
        if not self._unsaved and not request.path.endswith(SAVES):
            return response.body
        if request.path.endswith(SAVES) and response.status == 200:
            with contextlib.suppress(msgspec.MsgspecError):
                self._unsaved.add(msgspec.json.decode(response.body).get("request_id", ""))
        elif request.path.endswith("/retrieve_future") and response.status == 200:
            request_id = identify(request.method, request.headers, request.body)
            if request_id in self._unsaved and b'"try_again"' not in response.body[:200]:
                await asyncio.to_thread(self.commit)
                self._unsaved.discard(request_id)
        return response.body

    def _lost(self, request: WireRequest, response: WireResponse) -> bytes:
        try:
            subject = identify(request.method, request.headers, request.body) or ""
        except MalformedBody:
            return response.body
        server = self._app.state.server
        session = server.catalogue.session(subject.partition(":")[0])
        owner = server.keys.owner(dict(request.headers).get(b"x-api-key", b"").decode("latin-1"))
        if session is None or session.owner != owner or session.created_at >= self.started_at:
            return response.body
        response.status = 410
        return msgspec.json.encode(
            {
                "error": f"{subject} was in a container that is gone, with all it had not saved: "
                "load your last checkpoint into a new training client (create_training_client_from_state_with_optimizer)",
                "category": "user",
            }
        )


def compressed(body: bytes) -> bytes | None:
    """``body`` as gzip, or None when a look at its beginning says it is not worth the time."""
    if len(gzip.compress(body[:PROBE_BYTES], 1)) > 0.8 * min(len(body), PROBE_BYTES):
        return None
    return gzip.compress(body, 1)
