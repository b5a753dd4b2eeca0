"""Sessions: created, kept alive, finished, listed."""

from __future__ import annotations

import datetime
import uuid
from typing import Annotated, Any

import msgspec

from spindle.errors import InvalidRequest, NotFound
from spindle.server.routing import Call, Routes
from spindle.store.catalogue import SessionRow

routes = Routes()

FINISHES = ("success", "errored", "interrupted")


class CreateSession(msgspec.Struct):
    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class Heartbeat(msgspec.Struct):
    session_id: str


class Reason(msgspec.Struct):
    type: str


class Finish(msgspec.Struct):
    reason: Reason
    detail: str | None = None


@routes.post("/create_session")
async def create(call: Call) -> Any:
    request = await call.json(CreateSession)
    row = SessionRow(
        session_id=str(uuid.uuid4()),
        owner=call.owner,
        created_at=call.server.catalogue.clock(),
        tags=request.tags,
        user_metadata=request.user_metadata or {},
        display_name=request.display_name,
        sdk_version=request.sdk_version,
        project_id=request.project_id,
    )
    call.server.catalogue.add_session(row)
    call.server.open_session(row)
    return {"type": "create_session", "session_id": row.session_id}


@routes.post("/session_heartbeat")
async def heartbeat(call: Call) -> Any:
    call.server.session((await call.json(Heartbeat)).session_id, call.owner)
    return {"type": "session_heartbeat"}


@routes.post("/sessions/search")
async def search(call: Call) -> Any:
    request = await call.json(Search)
    if not 1 <= request.limit <= 200:
        raise InvalidRequest(f"limit is {request.limit}, allowed is 1 to 200")
    rows = [row for row in call.server.catalogue.sessions(call.owner) if request.matches(row, call.server.sessions)]
    if (cursor := request.cursor) is not None:
        key = (cursor.last_created_at, cursor.last_session_id)
        rows = [row for row in rows if (as_datetime(row.created_at), row.session_id) < key]
    page = rows[: request.limit]
    following = None
    if len(rows) > len(page):
        following = {"last_created_at": iso_time(page[-1].created_at), "last_session_id": page[-1].session_id}
    return {"sessions": [_summary(call, row) for row in page], "next_cursor": following}


@routes.post("/sessions/{session_id}/finish")
async def finish(call: Call) -> Any:
    request = await call.json(Finish)
    if request.reason.type not in FINISHES:
        raise InvalidRequest(f"reason.type is {request.reason.type[:100]!r}, allowed: {', '.join(FINISHES)}")
    row = _row(call)
    call.server.finish_session(row.session_id, request.reason.type, request.detail)
    return {}


@routes.get("/sessions")
async def listing(call: Call) -> Any:
    limit, offset = call.number("limit", 20, 10_000), call.number("offset", 0, 10**9)
    rows = call.server.catalogue.sessions(call.owner)
    return {"sessions": [row.session_id for row in rows[offset : offset + limit]]}


@routes.get("/sessions/{session_id}")
async def get(call: Call) -> Any:
    row = _row(call)
    catalogue = call.server.catalogue
    return {
        "training_run_ids": [run.run_id for run in catalogue.runs_of_session(row.session_id)],
        "sampler_ids": [sampler.sampler_id for sampler in catalogue.samplers_of_session(row.session_id)],
        "user_metadata": {key: str(value) for key, value in row.user_metadata.items()},
        "display_name": row.display_name,
    }


def _row(call: Call) -> SessionRow:
    row = call.server.catalogue.session(call.path("session_id"))
    if row is None or row.owner != call.owner:
        raise NotFound(f"no session {call.path('session_id')[:200]!r}")
    return row


# search


class StatusQuery(msgspec.Struct):
    type: str
    reasons: list[str] | None = None


class Cursor(msgspec.Struct):
    last_created_at: Annotated[datetime.datetime, msgspec.Meta(tz=True)]
    last_session_id: str


class Search(msgspec.Struct):
    """Every filter given must hold, but a session that matches either session_id or display_name matches both."""

    session_id: str | None = None
    project_ids: list[str] | None = None
    user_metadata: dict[str, str] = {}
    display_name: str | None = None
    owner: dict[str, Any] = {}
    statuses: list[StatusQuery] | None = None
    limit: int = 50
    cursor: Cursor | None = None

    def matches(self, row: SessionRow, live: Any) -> bool:
        if self.session_id is not None or self.display_name is not None:
            words = (self.display_name or "").lower().split()
            named = self.display_name is not None and all(word in (row.display_name or "").lower() for word in words)
            if not (named or row.session_id == self.session_id):
                return False
        if self.project_ids is not None and row.project_id not in self.project_ids:
            return False
        if any(row.user_metadata.get(key) != value for key, value in self.user_metadata.items()):
            return False
        return self.statuses is None or any(_has_status(query, row, live) for query in self.statuses)


def _has_status(query: StatusQuery, row: SessionRow, live: Any) -> bool:
    if query.type == "active":
        return row.status == "active" and row.session_id in live
    return query.type == "client_finished" and row.status in (query.reasons or FINISHES) and row.status in FINISHES


def _summary(call: Call, row: SessionRow) -> dict[str, Any]:
    catalogue = call.server.catalogue
    checkpoints = [item for run in catalogue.runs_of_session(row.session_id) for item in catalogue.checkpoints_of_run(run.run_id)]
    status: dict[str, Any] | None = None
    if row.status in FINISHES:
        status = {"type": "client_finished", "reason": {"type": row.status}, "detail": row.detail}
    elif row.status == "active" and row.session_id in call.server.sessions:
        status = {"type": "active"}
    return {
        "session_id": row.session_id,
        "created_at": iso_time(row.created_at),
        "owner": row.owner,
        "project_id": row.project_id or "",
        "status": status,
        "checkpoints_count": len(checkpoints),
        "display_name": row.display_name,
        "user_metadata": {key: str(value) for key, value in row.user_metadata.items()},
        "checkpoint_storage_bytes": sum(item.size_bytes for item in checkpoints),
    }


def as_datetime(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC)


def iso_time(seconds: float) -> str:
    return as_datetime(seconds).isoformat()
