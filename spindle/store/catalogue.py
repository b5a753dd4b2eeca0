"""What exists on disk and whose it is: sessions, runs, checkpoints, samplers, in one SQLite file.

Safe to call from several threads. Reads never see an expired checkpoint. A checkpoint is listed only once its
directory is whole on disk, and that row is synced before the call returns.
"""

from __future__ import annotations

import json
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from spindle.errors import InvalidRequest, NotFound
from spindle.store.files import directory_bytes, remove_directory, sweep_temporary
from spindle.store.names import TinkerPath

__all__ = ["Catalogue", "CheckpointRow", "RunRow", "SamplerRow", "SessionRow"]

SCHEMA_VERSION = 1
UNNAMED = ""  # model_path of a sampler on weights that were published without a name, and live in memory only
_SCHEMA = """
CREATE TABLE sessions (session_id TEXT PRIMARY KEY, owner TEXT NOT NULL, created_at REAL NOT NULL, status TEXT NOT NULL, detail TEXT,
    tags TEXT NOT NULL, user_metadata TEXT NOT NULL, display_name TEXT, sdk_version TEXT NOT NULL, project_id TEXT) WITHOUT ROWID;
CREATE INDEX sessions_by_owner ON sessions (owner, created_at);
CREATE TABLE runs (run_id TEXT PRIMARY KEY, session_id TEXT NOT NULL, owner TEXT NOT NULL, created_at REAL NOT NULL,
    last_request_at REAL NOT NULL, base_model TEXT NOT NULL, lora TEXT NOT NULL, optimizer TEXT NOT NULL, user_metadata TEXT) WITHOUT ROWID;
CREATE INDEX runs_by_owner ON runs (owner, created_at);
CREATE INDEX runs_by_session ON runs (session_id);
CREATE TABLE checkpoints (run_id TEXT NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL, owner TEXT NOT NULL, created_at REAL NOT NULL,
    directory TEXT NOT NULL, size_bytes INTEGER NOT NULL, expires_at REAL, public INTEGER NOT NULL, user_metadata TEXT,
    PRIMARY KEY (run_id, kind, name)) WITHOUT ROWID;
CREATE INDEX checkpoints_by_owner ON checkpoints (owner, created_at);
CREATE INDEX checkpoints_by_expiry ON checkpoints (expires_at) WHERE expires_at IS NOT NULL;
CREATE TABLE samplers (sampler_id TEXT PRIMARY KEY, session_id TEXT NOT NULL, owner TEXT NOT NULL, created_at REAL NOT NULL,
    base_model TEXT NOT NULL, model_path TEXT, clones INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX samplers_by_session ON samplers (session_id);
"""


@dataclass(frozen=True)
class SessionRow:
    session_id: str
    owner: str
    created_at: float
    status: str = "active"  # active, success, errored, interrupted, expired
    detail: str | None = None
    tags: list[str] = field(default_factory=list)
    user_metadata: dict[str, Any] = field(default_factory=dict)
    display_name: str | None = None
    sdk_version: str = ""
    project_id: str | None = None


@dataclass(frozen=True)
class RunRow:
    run_id: str
    session_id: str
    owner: str
    created_at: float
    last_request_at: float
    base_model: str
    lora: dict[str, Any]
    optimizer: dict[str, Any]
    user_metadata: dict[str, Any] | None = None


@dataclass(frozen=True)
class CheckpointRow:
    """``directory`` is relative to the store; times are seconds since 1970."""

    run_id: str
    kind: str
    name: str
    owner: str
    created_at: float
    directory: str
    size_bytes: int
    expires_at: float | None = None
    public: bool = False
    user_metadata: dict[str, str] | None = None

    @property
    def path(self) -> TinkerPath:
        return TinkerPath(self.run_id, self.kind, self.name)


@dataclass(frozen=True)
class SamplerRow:
    sampler_id: str
    session_id: str
    owner: str
    created_at: float
    base_model: str
    model_path: str | None = None
    clones: int = 0


Row = TypeVar("Row", SessionRow, RunRow, CheckpointRow, SamplerRow)
_JSON = {"tags", "user_metadata", "lora", "optimizer"}


def _decode(kind: type[Row], row: sqlite3.Row) -> Row:
    values = {name: row[name] for name in row.keys()}  # noqa: SIM118 (a Row iterates over values)
    for name in _JSON & values.keys():
        values[name] = None if values[name] is None else json.loads(values[name])
    if "public" in values:
        values["public"] = bool(values["public"])
    return kind(**values)


class Catalogue:
    """Opens (or makes) ``directory/catalogue.sqlite`` and sweeps what crashed writers left behind.

    One process at a time: a second one is refused with InvalidRequest. ``clock`` gives seconds since 1970.
    """

    def __init__(self, directory: str | Path, clock: Callable[[], float] = time.time) -> None:
        self.directory = Path(directory)
        self.clock = clock
        self.directory.mkdir(parents=True, exist_ok=True)
        self._lock = threading.RLock()
        self._owner_file = _lock_directory(self.directory)
        self._connection = sqlite3.connect(self.directory / "catalogue.sqlite", check_same_thread=False, isolation_level=None)
        self._connection.row_factory = sqlite3.Row
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = NORMAL")
        version = self._connection.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            self._connection.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
        elif version != SCHEMA_VERSION:
            raise InvalidRequest(f"{self.directory} was written by another version (schema {version}, this one reads {SCHEMA_VERSION})")
        sweep_temporary(self.directory)
        self._sweep_unlisted()
        self.delete_expired()

    def close(self) -> None:
        with self._lock:
            self._connection.close()
            self._owner_file.close()

    # sessions

    def add_session(self, row: SessionRow) -> None:
        self._insert("sessions", row)

    def session(self, session_id: str) -> SessionRow | None:
        return self._one(SessionRow, "SELECT * FROM sessions WHERE session_id = ?", session_id)

    def finish_session(self, session_id: str, status: str, detail: str | None) -> None:
        """The first finish wins; a later one changes nothing."""
        self._write("UPDATE sessions SET status = ?, detail = ? WHERE session_id = ? AND status = 'active'", status, detail, session_id)

    def sessions(self, owner: str) -> list[SessionRow]:
        """Newest first."""
        return self._all(SessionRow, "SELECT * FROM sessions WHERE owner = ? ORDER BY created_at DESC, session_id DESC", owner)

    # runs

    def add_run(self, row: RunRow) -> None:
        self._insert("runs", row)

    def run(self, run_id: str) -> RunRow | None:
        return self._one(RunRow, "SELECT * FROM runs WHERE run_id = ?", run_id)

    def touch_run(self, run_id: str, last_request_at: float) -> None:
        self._write("UPDATE runs SET last_request_at = ? WHERE run_id = ?", last_request_at, run_id)

    def runs(self, owner: str, limit: int, offset: int) -> tuple[list[RunRow], int]:
        """One page, newest first, and how many there are in all."""
        query = "SELECT * FROM runs WHERE owner = ? ORDER BY created_at DESC, run_id LIMIT ? OFFSET ?"
        return self._all(RunRow, query, owner, limit, offset), self._count("runs WHERE owner = ?", owner)

    def runs_of_session(self, session_id: str) -> list[RunRow]:
        return self._all(RunRow, "SELECT * FROM runs WHERE session_id = ? ORDER BY created_at, run_id", session_id)

    # checkpoints

    def new_checkpoint_directory(self, path: TinkerPath) -> Path:
        """A place of its own for a checkpoint's files, so that replacing one of the same name is a change of one row."""
        run = path.run_id.replace(":", "-")
        return self.directory / "runs" / run / path.kind / f"{path.name}-{secrets.token_hex(4)}"

    def add_checkpoint(self, row: CheckpointRow, replace: bool = False) -> None:
        """List a checkpoint whose directory is whole, synced to disk when this returns.

        When the name is taken: with ``replace`` the old one's files go, without it InvalidRequest (and the new files go).
        """
        with self._lock:
            old = self._find(row.path)
            if old is not None and not replace:
                remove_directory(self.directory / row.directory)
                raise InvalidRequest(f"checkpoint {row.path} exists already: choose another name, or overwrite it")
            try:
                with self._durable():
                    self._insert("checkpoints", row, "INSERT OR REPLACE")
            except sqlite3.Error:
                remove_directory(self.directory / row.directory)
                raise
            if old is not None:
                remove_directory(self.directory / old.directory)

    def checkpoint(self, path: TinkerPath) -> CheckpointRow:
        """Raises NotFound."""
        row = self._find(path)
        if row is None:
            raise NotFound(f"no checkpoint {path}: it was never saved, was deleted, or has expired")
        return row

    def files(self, row: CheckpointRow) -> Path:
        return self.directory / row.directory

    def checkpoints_of_run(self, run_id: str) -> list[CheckpointRow]:
        query = f"SELECT * FROM checkpoints WHERE run_id = ? AND {_ALIVE} ORDER BY created_at, kind, name"
        return self._all(CheckpointRow, query, run_id, self.clock())

    def checkpoints(self, owner: str, limit: int, offset: int) -> tuple[list[CheckpointRow], int]:
        """One page, newest first, and how many there are in all."""
        now = self.clock()
        query = f"SELECT * FROM checkpoints WHERE owner = ? AND {_ALIVE} ORDER BY created_at DESC, run_id, kind, name LIMIT ? OFFSET ?"
        rows = self._all(CheckpointRow, query, owner, now, limit, offset)
        return rows, self._count(f"checkpoints WHERE owner = ? AND {_ALIVE}", owner, now)

    def delete_checkpoint(self, path: TinkerPath) -> None:
        with self._lock:
            row = self.checkpoint(path)
            with self._durable():
                self._write("DELETE FROM checkpoints WHERE run_id = ? AND kind = ? AND name = ?", *path)
            remove_directory(self.files(row))

    def publish_checkpoint(self, path: TinkerPath, public: bool) -> None:
        self._change_checkpoint(path, "public", int(public))

    def expire_checkpoint(self, path: TinkerPath, expires_at: float | None) -> None:
        self._change_checkpoint(path, "expires_at", expires_at)

    def delete_expired(self) -> float | None:
        """Delete what has expired; returns when the next one will, or None."""
        with self._lock:
            query = "SELECT * FROM checkpoints WHERE expires_at <= ?"
            for row in self._all(CheckpointRow, query, self.clock()):
                self._write("DELETE FROM checkpoints WHERE run_id = ? AND kind = ? AND name = ?", *row.path)
                remove_directory(self.files(row))
            return self._connection.execute("SELECT MIN(expires_at) FROM checkpoints").fetchone()[0]

    # samplers

    def add_sampler(self, row: SamplerRow) -> None:
        self._insert("samplers", row, "INSERT OR REPLACE")

    def sampler(self, sampler_id: str) -> SamplerRow | None:
        return self._one(SamplerRow, "SELECT * FROM samplers WHERE sampler_id = ?", sampler_id)

    def samplers_of_session(self, session_id: str) -> list[SamplerRow]:
        return self._all(SamplerRow, "SELECT * FROM samplers WHERE session_id = ? ORDER BY created_at, sampler_id", session_id)

    def join_sampler(self, sampler_id: str) -> int:
        """A number no other client of this sampler has had, from 1."""
        with self._lock:
            self._write("UPDATE samplers SET clones = clones + 1 WHERE sampler_id = ?", sampler_id)
            row = self.sampler(sampler_id)
        if row is None:
            raise NotFound(f"no sampler {sampler_id!r}")
        return row.clones

    # inside

    def _find(self, path: TinkerPath) -> CheckpointRow | None:
        query = f"SELECT * FROM checkpoints WHERE run_id = ? AND kind = ? AND name = ? AND {_ALIVE}"
        return self._one(CheckpointRow, query, *path, self.clock())

    def _change_checkpoint(self, path: TinkerPath, column: str, value: Any) -> None:
        with self._lock:
            self.checkpoint(path)
            self._write(f"UPDATE checkpoints SET {column} = ? WHERE run_id = ? AND kind = ? AND name = ?", value, *path)

    def _insert(self, table: str, row: Any, verb: str = "INSERT") -> None:
        names = [item.name for item in fields(row)]
        values = [_encode(getattr(row, name)) if name in _JSON else getattr(row, name) for name in names]
        self._write(f"{verb} INTO {table} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})", *values)

    def _write(self, query: str, *values: Any) -> None:
        with self._lock:
            self._connection.execute(query, values)

    def _all(self, kind: type[Row], query: str, *values: Any) -> list[Row]:
        with self._lock:
            return [_decode(kind, row) for row in self._connection.execute(query, values)]

    def _one(self, kind: type[Row], query: str, *values: Any) -> Row | None:
        rows = self._all(kind, query, *values)
        return rows[0] if rows else None

    def _count(self, rest: str, *values: Any) -> int:
        with self._lock:
            return self._connection.execute(f"SELECT COUNT(*) FROM {rest}", values).fetchone()[0]

    @contextmanager
    def _durable(self) -> Iterator[None]:
        self._connection.execute("PRAGMA synchronous = FULL")
        try:
            yield
        finally:
            self._connection.execute("PRAGMA synchronous = NORMAL")

    def _sweep_unlisted(self) -> None:
        listed = {row["directory"] for row in self._connection.execute("SELECT directory FROM checkpoints")}
        for path in self.directory.glob("runs/*/*/*"):
            if str(path.relative_to(self.directory)) not in listed:
                remove_directory(path)


_ALIVE = "(expires_at IS NULL OR expires_at > ?)"


def checkpoint_row(
    catalogue: Catalogue,
    path: TinkerPath,
    owner: str,
    files: Path,
    ttl_seconds: int | None = None,
    user_metadata: Mapping[str, str] | None = None,
) -> CheckpointRow:
    """The row of a checkpoint that was just written to ``files``."""
    now = catalogue.clock()
    return CheckpointRow(
        run_id=path.run_id,
        kind=path.kind,
        name=path.name,
        owner=owner,
        created_at=now,
        directory=str(files.relative_to(catalogue.directory)),
        size_bytes=directory_bytes(files),
        expires_at=None if ttl_seconds is None else now + ttl_seconds,
        user_metadata=None if user_metadata is None else dict(user_metadata),
    )


def _encode(value: Any) -> str | None:
    return None if value is None else json.dumps(value)


def _lock_directory(directory: Path) -> Any:
    import fcntl

    file = open(directory / "in-use", "w")  # noqa: SIM115 (held while the catalogue is open)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise InvalidRequest(f"store {directory} is in use by another server: give each its own directory") from None
    return file
