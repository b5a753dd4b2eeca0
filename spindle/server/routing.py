"""From a request to a handler: who calls, what the body says, how an error is answered.

A route file makes a ``Routes`` and decorates handlers that take a ``Call`` and return a Response (or a value to send as JSON).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from spindle.errors import InvalidRequest
from spindle.server.answers import error_response, json_response
from spindle.server.bodies import Reservation, decode, read_body

if TYPE_CHECKING:
    from spindle.server.state import Server

__all__ = ["PREFIX", "Call", "Routes"]

PREFIX = "/api/v1"
T = TypeVar("T")
R = TypeVar("R")


@dataclass(slots=True)
class Call:
    """One authenticated HTTP request."""

    server: Server
    request: Request
    owner: str
    room: Reservation  # for the body, until the call is answered

    async def body(self, limit: int | None = None) -> bytes | memoryview:
        """The whole body; ``limit``: bytes it may have, by default what a request without tensors needs."""
        settings = self.server.settings
        limit = limit or min(settings.max_plain_json_bytes, settings.max_json_bytes)
        return await read_body(self.request, limit, settings.body_idle_timeout_s, self.room)

    async def json(self, kind: type[T]) -> T:
        return await self.decode(kind, await self.body())

    async def decode(self, kind: type[T], body: bytes | memoryview) -> T:
        """``decode``, in a thread when the body is not small."""
        return await self.off_loop(len(body), decode, kind, body)

    async def off_loop(self, nbytes: int, function: Callable[..., R], *args: Any) -> R:
        """``function(*args)``, whose work grows with ``nbytes``: here when they are few, else in a thread."""
        if nbytes < self.server.settings.inline_scan_bytes:
            return function(*args)
        return await asyncio.get_running_loop().run_in_executor(self.server.scanners, function, *args)

    def path(self, name: str) -> str:
        return self.request.path_params[name]

    def number(self, name: str, default: int, most: int) -> int:
        """A whole number of the query string, from 0 to ``most``."""
        text = self.request.query_params.get(name, str(default))
        if not (text.isascii() and text.isdigit() and len(text) < 12 and int(text) <= most):
            raise InvalidRequest(f"{name} is {text[:100]!r}, allowed is a whole number from 0 to {most}")
        return int(text)

    async def in_thread(self, function: Callable[..., R], *args: Any) -> R:
        """Run something that touches the disk without holding up the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self.server.io, function, *args)


Handler = Callable[[Call], Awaitable[Any]]


def _key(request: Request) -> str | None:
    """``X-API-Key``, or ``Authorization: Bearer`` for tools that know only that."""
    return request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix("Bearer ") or None


class Routes(list[Route]):
    """Routes of one noun. ``public`` ones need no key."""

    def _add(self, method: str, path: str, public: bool, prefix: str) -> Callable[[Handler], Handler]:
        def register(handler: Handler) -> Handler:
            async def endpoint(request: Request) -> Response:
                try:
                    server: Server = request.app.state.server
                    owner = server.keys.owner(_key(request))
                    if owner is None:
                        if not public:
                            return json_response(
                                {"error": "X-API-Key is missing or not one of this server's keys", "category": "user"}, 401
                            )
                        owner = ""
                    call = Call(server, request, owner, Reservation(server.receiving))
                    try:
                        answer = await handler(call)
                    finally:
                        call.room.release()
                    return answer if isinstance(answer, Response) else json_response(answer)
                except Exception as error:
                    return error_response(error)

            self.append(Route(prefix + path, endpoint, methods=[method]))
            return handler

        return register

    def get(self, path: str, public: bool = False, prefix: str = PREFIX) -> Callable[[Handler], Handler]:
        return self._add("GET", path, public, prefix)

    def post(self, path: str, public: bool = False) -> Callable[[Handler], Handler]:
        return self._add("POST", path, public, PREFIX)

    def put(self, path: str) -> Callable[[Handler], Handler]:
        return self._add("PUT", path, False, PREFIX)

    def delete(self, path: str) -> Callable[[Handler], Handler]:
        return self._add("DELETE", path, False, PREFIX)
