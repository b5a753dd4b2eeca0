"""The ASGI application: all routes over one engine and one store."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from spindle.server import (
    auth,
    client,
    custom_losses,
    downloads,
    external,
    live_view,
    metrics,
    models,
    polling,
    runs,
    sampling,
    sessions,
    training,
    weights,
)
from spindle.server.answers import error_response, json_response
from spindle.server.keys import Keys
from spindle.server.settings import ServerSettings
from spindle.server.state import Server

__all__ = ["create_app"]

# The busiest first: routes are tried in order.
NOUNS = (polling, training, sampling, weights, external, sessions, models, client, runs, downloads, metrics, custom_losses, live_view, auth)


def create_app(
    engine: Any,
    store: str | Path,
    api_keys: Mapping[str, str] | Iterable[str] | None = None,
    name: str | None = None,
    aliases: Iterable[str] = (),
    settings: ServerSettings | None = None,
) -> Starlette:
    """The Tinker REST API over ``engine``, with checkpoints and catalogue in the directory ``store``.

    api_keys: {owner: key}, or keys ("tml-…" or "owner=tml-…"); without any, every caller is the one owner "local".
    name, aliases: what clients may ask for as base model.
    Raises InvalidRequest when the store is in use or the keys are not usable.
    """
    server = Server(engine, store, Keys(api_keys), settings or ServerSettings(), name, aliases)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await server.start()
        try:
            yield
        finally:
            await server.stop()

    app = App(
        routes=[route for noun in NOUNS for route in noun.routes],
        lifespan=lifespan,
        exception_handlers={HTTPException: _http_error, Exception: _unexpected},
    )
    app.router.redirect_slashes = False
    app.state.server = server
    return app


class App(Starlette):
    """Starlette, with a short way to the routes whose path has no parameters: they answer their own errors and need no middleware, and
    finding them and passing through it costs as much as all the rest of a small request's handling."""

    def __init__(self, routes: Sequence[Route], **options: Any) -> None:
        super().__init__(routes=routes, **options)
        self._plain = {(method, route.path): route.endpoint for route in routes if "{" not in route.path for method in route.methods or ()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._plain.get((scope["method"], scope["path"])) if scope["type"] == "http" and not scope.get("root_path") else None
        if endpoint is None or self.user_middleware:
            await super().__call__(scope, receive, send)
            return
        scope["app"] = self
        response = await endpoint(Request(scope, receive, send))
        await response(scope, receive, send)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = error.detail
    if error.status_code == 404:
        text = f"no {request.method} {request.url.path[:200]} on this server (it has no billing, audit or projects)"
    return json_response({"error": text, "category": "user"}, error.status_code, dict(error.headers or {}))


async def _unexpected(request: Request, error: Exception) -> Response:
    return error_response(error)
