"""Running the application under uvicorn."""

from __future__ import annotations

import contextlib
import gc
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import uvicorn

from spindle.errors import InvalidRequest, ServerError
from spindle.server.app import create_app
from spindle.server.keys import is_loopback
from spindle.server.protocol import bounded_protocol
from spindle.server.settings import ServerSettings

__all__ = ["freeze_heap", "running", "serve"]

Keys = Mapping[str, str] | Iterable[str] | None


def _uvicorn(
    engine: Any,
    host: str,
    port: int,
    store: str | Path,
    api_keys: Keys,
    name: str | None,
    aliases: Iterable[str],
    settings: ServerSettings | None,
    log_level: str,
) -> uvicorn.Server:
    api_keys = api_keys if api_keys is None or isinstance(api_keys, Mapping) else list(api_keys)
    if not api_keys and not is_loopback(host):
        raise InvalidRequest(f"without an API key only this machine may connect: listen on 127.0.0.1 instead of {host}, or give a key")
    app = create_app(engine, store, api_keys, name, aliases, settings)
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        loop="uvloop",
        http=bounded_protocol(settings or ServerSettings()),
        ws="none",
        lifespan="on",
        log_level=log_level,
        access_log=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=5,
        backlog=4096,
    )
    return _Server(config)


class _Server(uvicorn.Server):
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.config.app.state.server.release_polls()  # type: ignore[union-attr]
        await super().shutdown(sockets)


def freeze_heap() -> None:
    """For a process that does nothing but serve, once it is ready: take what is there now out of the garbage collector's sight.

    torch and transformers alone are hundreds of thousands of objects that stay to the end; each full collection would look at them all, and
    stop every thread for a tenth of a second and more.
    """
    gc.collect()
    gc.freeze()


def serve(
    engine: Any,
    host: str = "127.0.0.1",
    port: int = 8000,
    store: str | Path = "spindle-store",
    api_keys: Keys = None,
    name: str | None = None,
    aliases: Iterable[str] = (),
    settings: ServerSettings | None = None,
    log_level: str = "info",
) -> None:
    """Serve until interrupted; the process is the server's own (``freeze_heap``).

    Raises InvalidRequest when no key is given and ``host`` is not loopback, or the store is in use.
    """
    server = _uvicorn(engine, host, port, store, api_keys, name, aliases, settings, log_level)
    freeze_heap()
    server.run()


@contextlib.contextmanager
def running(
    engine: Any,
    host: str = "127.0.0.1",
    port: int = 0,
    store: str | Path = "spindle-store",
    api_keys: Keys = None,
    name: str | None = None,
    aliases: Iterable[str] = (),
    settings: ServerSettings | None = None,
    log_level: str = "warning",
) -> Iterator[str]:
    """A server in a thread of this process, for as long as the block runs; yields its URL. Port 0 is any free one."""
    server = _uvicorn(engine, host, port, store, api_keys, name, aliases, settings, log_level)
    ready = threading.Event()
    startup = server.startup

    async def startup_then_tell(sockets: list[socket.socket] | None = None) -> None:
        await startup(sockets)
        ready.set()

    server.startup = startup_then_tell  # type: ignore[method-assign]
    failures: list[BaseException] = []

    def run() -> None:
        try:
            server.run()
        except BaseException as error:
            failures.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=run, name="spindle-server", daemon=True)
    thread.start()
    ready.wait()
    if not server.started:
        thread.join()
        raise ServerError(f"the server did not start on {host}:{port}: {failures[0] if failures else 'see its log'}")
    address = server.servers[0].sockets[0].getsockname()
    try:
        yield f"http://{f'[{address[0]}]' if ':' in address[0] else address[0]}:{address[1]}"
    finally:
        server.should_exit = True
        thread.join()
