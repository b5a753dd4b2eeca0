"""uvicorn's HTTP/1.1 protocol with bounds on request heads: their bytes, and the time they take to arrive."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from spindle.server.settings import ServerSettings

__all__ = ["bounded_protocol"]


def bounded_protocol(settings: ServerSettings) -> type[HttpToolsProtocol]:
    """A protocol class that closes connections whose request head is too slow or too long."""

    class BoundedProtocol(HttpToolsProtocol):
        _head_bytes = 0
        _head_timer: asyncio.TimerHandle | None = None
        _in_head = True

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._start_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._in_head:
                self._head_bytes += len(data)
            super().data_received(data)
            if self._in_head and self._head_bytes > settings.max_header_bytes and not self.transport.is_closing():
                self._stop_timer()
                self.send_400_response(f"The request line and headers have more than {settings.max_header_bytes} bytes.")

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._in_head = True
            if self._head_timer is None:
                self._start_timer()

        def on_headers_complete(self) -> None:
            self._stop_timer()
            self._in_head, self._head_bytes = False, 0
            super().on_headers_complete()

        def _start_timer(self) -> None:
            self._head_timer = self.loop.call_later(settings.header_timeout_s, self._too_slow)

        def _stop_timer(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

        def _too_slow(self) -> None:
            self._head_timer = None
            if not self.transport.is_closing():
                self.transport.close()

    return BoundedProtocol
