"""The server's state: one engine, one catalogue, and what lives in memory. Everything here runs on the event loop."""

from __future__ import annotations

import asyncio
import secrets
import sqlite3
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from spindle.errors import InvalidRequest, NotFound
from spindle.server.answers import log
from spindle.server.bodies import Receiving
from spindle.server.futures import Entry, Gone, Registry
from spindle.server.keys import Keys
from spindle.server.live import LiveModel, LiveSampler, LiveSession, Published, Weights
from spindle.server.settings import ServerSettings
from spindle.store.catalogue import UNNAMED, Catalogue, CheckpointRow, RunRow, SamplerRow, SessionRow
from spindle.store.names import TinkerPath, parse_path

__all__ = ["Server"]


class Server:
    """``start`` once the event loop runs, ``stop`` at the end. ``engine`` is not closed: whoever made it does that."""

    def __init__(
        self,
        engine: Any,
        store: str | Path,
        keys: Keys,
        settings: ServerSettings,
        name: str | None,
        aliases: Iterable[str],
    ) -> None:
        self.engine = engine
        self.keys = keys
        self.settings = settings
        self.name = name or engine.model_name
        self.names = [self.name, *(alias for alias in aliases if alias != self.name)]
        self.catalogue = Catalogue(store)
        self.sessions: dict[str, LiveSession] = {}
        self.models: dict[str, LiveModel] = {}
        self.samplers: dict[str, LiveSampler] = {}
        self.published = Published(settings.max_snapshot_bytes)
        self.receiving = Receiving(settings.max_receiving_bytes, settings.inline_scan_bytes)
        self.signing_key = secrets.token_bytes(32)
        self.io = ThreadPoolExecutor(settings.io_threads, thread_name_prefix="spindle-store")
        self.scanners = ThreadPoolExecutor(settings.scan_threads, thread_name_prefix="spindle-scan")
        self.futures: Registry
        self._opened: weakref.WeakValueDictionary[str, Weights] = weakref.WeakValueDictionary()  # by directory: files never change
        self._recent: deque[Weights] = deque(maxlen=4)  # kept for requests that name a path and open no session
        self._expiry: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task] = set()

    async def start(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.futures = Registry(self.settings, self.loop)
        self.schedule_expiry()

    def release_polls(self) -> None:
        """Answer every parked poll now, so that stopping does not wait for them."""
        self.futures.release_polls()
        for sampler in self.samplers.values():
            for channel in sampler.channels.values():
                channel.wake()

    async def stop(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        for session in list(self.sessions.values()):
            self.free_session(session)
        self.scanners.shutdown(wait=False, cancel_futures=True)
        self.io.shutdown(wait=True)
        self.catalogue.close()

    def spawn(self, coroutine: Any) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # names

    def base_model(self, requested: str | None) -> str:
        """The name a client asked for, without its suffix. Raises InvalidRequest listing what is served."""
        wanted = (requested or "").split(":")[0]
        if wanted not in self.names:
            raise InvalidRequest(f"base_model {(requested or '')[:200]!r} is not served here; this server has: {', '.join(self.names)}")
        return wanted

    # sessions

    def open_session(self, row: SessionRow) -> LiveSession:
        session = LiveSession(row.session_id, row.owner, self.settings.session_timeout_s, self._expire_session)
        self.sessions[row.session_id] = session
        return session

    def session(self, session_id: str, owner: str) -> LiveSession:
        """A live session; one that is known from before a restart lives again. Raises NotFound, or Gone when it is over."""
        session = self.sessions.get(session_id)
        if session is not None and session.owner == owner:
            session.touch()
            return session
        row = self.catalogue.session(session_id)
        if row is None or row.owner != owner:
            raise NotFound(f"no session {session_id[:200]!r}")
        if row.status != "active":
            raise Gone(f"session {session_id} is over ({row.status}): create a new one")
        return self.open_session(row)

    def finish_session(self, session_id: str, status: str, detail: str | None) -> None:
        self.catalogue.finish_session(session_id, status, detail)
        session = self.sessions.get(session_id)
        if session is not None:
            self.free_session(session)

    def _expire_session(self, session: LiveSession) -> None:
        log.info("session %s had no heartbeat for %g s: freeing its adapters", session.session_id, self.settings.session_timeout_s)
        detail = f"no heartbeat for {self.settings.session_timeout_s:g} s"
        self.free_session(session)
        self.catalogue.finish_session(session.session_id, "expired", detail)

    def free_session(self, session: LiveSession) -> None:
        session.close()
        self.sessions.pop(session.session_id, None)
        for model_id in list(session.models):
            self.unload_model(model_id)
        for sampler_id in session.samplers:
            self.futures.cancel_scope(sampler_id)
            self.samplers.pop(sampler_id, None)
            self.published.release(sampler_id)
        self.engine.records.forget_session(session.session_id)

    # models

    def add_model(self, session: LiveSession, row: RunRow) -> LiveModel:
        """List an adapter that the engine holds."""
        model = LiveModel(row.run_id, session.session_id, row.owner, row.base_model, row.lora["rank"], row.optimizer, row.last_request_at)
        self.catalogue.add_run(row)
        self.models[row.run_id] = model
        session.models.add(row.run_id)
        return model

    def model(self, model_id: str, owner: str) -> LiveModel:
        """A live model of the caller. Raises NotFound saying whether it ever was."""
        model = self.models.get(model_id)
        if model is not None and model.owner == owner:
            model.last_request_at = self.catalogue.clock()
            return model
        row = self.catalogue.run(model_id)
        if row is None or row.owner != owner:
            raise NotFound(f"no model {model_id[:200]!r}: create it first")
        raise NotFound(
            f"model {model_id} is no longer in memory (it was unloaded, its session ended, or the server restarted): "
            "create a training client from its last checkpoint"
        )

    def unload_model(self, model_id: str) -> None:
        model = self.models.pop(model_id, None)
        if model is None:
            return
        if session := self.sessions.get(model.session_id):
            session.models.discard(model_id)
        self.published.release(model_id)
        try:
            self.engine.unload(model_id)
        except NotFound:
            pass
        try:
            self.catalogue.touch_run(model_id, model.last_request_at)
        except sqlite3.Error as error:
            log.error("the last request of %s is not written down: %s", model_id, error)

    # checkpoints

    def checkpoint(self, path: TinkerPath, owner: str) -> CheckpointRow:
        """A checkpoint that the caller may change. Raises NotFound."""
        row = self.catalogue.checkpoint(path)
        if row.owner != owner:
            raise NotFound(f"no checkpoint {path}: it was never saved, was deleted, or has expired")
        return row

    def readable(self, text: str, owner: str, token: str | None = None) -> CheckpointRow:
        """A checkpoint that the caller (or the owner of the key ``token``) may read: its own, or a published one."""
        path = parse_path(text)
        row = self.catalogue.checkpoint(path)
        if row.public or row.owner == owner or (token and row.owner == self.keys.owner(token)):
            return row
        raise NotFound(f"no checkpoint {path}: it was never saved, was deleted, or has expired")

    def schedule_expiry(self) -> None:
        """Delete what has expired, and come back when the next one does."""
        if self._expiry is not None:
            self._expiry.cancel()
        at = self.catalogue.delete_expired()
        if at is not None:
            delay = min(max(0.0, at - self.catalogue.clock()), 24 * 3600.0)
            self._expiry = self.loop.call_later(delay, self.schedule_expiry)

    # samplers

    def add_sampler(self, session: LiveSession, row: SamplerRow, weights: Weights) -> LiveSampler:
        if self.sessions.get(session.session_id) is not session:  # it ended while the weights were read
            raise Gone(f"session {session.session_id} is over: create a new one")
        sampler = LiveSampler(row.sampler_id, session.session_id, row.owner, row.base_model, row.model_path, weights)
        self.catalogue.add_sampler(row)
        self.samplers[row.sampler_id] = sampler
        session.samplers.add(row.sampler_id)
        return sampler

    async def sampler(self, sampler_id: str, owner: str) -> LiveSampler:
        """A sampler of the caller; one with a base model or a path comes back after a restart. Raises NotFound."""
        sampler = self.samplers.get(sampler_id)
        if sampler is not None and sampler.owner == owner:
            return sampler
        row = self.catalogue.sampler(sampler_id)
        if row is None or row.owner != owner:
            raise NotFound(f"no sampling session {sampler_id[:200]!r}")
        session = self.session(row.session_id, owner)
        if row.model_path == UNNAMED:
            raise NotFound(f"sampling session {sampler_id} was on weights without a name, which a restart drops: save them under a name")
        weights = await self.weights_of(row.model_path, owner)
        return self.samplers.get(sampler_id) or self.add_sampler(session, row, weights)

    async def weights_of(self, model_path: str | None, owner: str, token: str | None = None) -> Weights:
        """The weights behind a path, or the base model's. Raises NotFound, InvalidRequest."""
        if model_path is None:
            return Weights(base=True)
        row = self.readable(model_path, owner, token)
        if row.kind == "external_weights":
            raise InvalidRequest(f"{row.path} is an external export: sample from weights or sampler_weights")
        weights = self._opened.get(row.directory)
        if weights is None:
            snapshot = await self.loop.run_in_executor(self.io, self.engine.open_snapshot, self.catalogue.files(row))
            weights = self._opened[row.directory] = Weights(snapshot, nbytes=row.size_bytes)
        self._recent.append(weights)
        return weights

    def settled(self, sampler: LiveSampler, clone: int, entry: Entry) -> None:
        """Tell whoever polls this sampling client's completions."""
        assert entry.answer is not None
        sampler.channel(clone).add(entry.request_id, entry.answer.failed, entry.answer.nbytes)

    def stats(self) -> Mapping[str, Any]:
        return {
            "sessions": len(self.sessions),
            "models": len(self.models),
            "samplers": len(self.samplers),
            "pending_requests": self.futures.pending,
            "kept_answer_bytes": self.futures.kept_bytes,
            "published_bytes": self.published.nbytes,
            "receiving_bytes": self.receiving.nbytes,
        }
