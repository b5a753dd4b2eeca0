"""Training runs and their checkpoints: listed, published, expired, deleted."""

from __future__ import annotations

from typing import Any

import msgspec

from spindle.errors import InvalidRequest, NotFound
from spindle.server.routing import Call, Routes
from spindle.server.sessions import iso_time
from spindle.store.catalogue import CheckpointRow, RunRow
from spindle.store.names import KINDS, TinkerPath, check_ttl

routes = Routes()

CHECKPOINT = "/training_runs/{run_id}/checkpoints/{kind}/{name}"


def checkpoint_json(row: CheckpointRow) -> dict[str, Any]:
    return {
        "checkpoint_id": row.path.checkpoint_id,
        "checkpoint_type": KINDS[row.kind],
        "time": iso_time(row.created_at),
        "tinker_path": str(row.path),
        "size_bytes": row.size_bytes,
        "public": row.public,
        "user_metadata": row.user_metadata,
        "expires_at": None if row.expires_at is None else iso_time(row.expires_at),
    }


def run_json(call: Call, row: RunRow) -> dict[str, Any]:
    live = call.server.models.get(row.run_id)
    last: dict[str, Any] = {}
    for checkpoint in call.server.catalogue.checkpoints_of_run(row.run_id):
        last[checkpoint.kind] = checkpoint
    return {
        "training_run_id": row.run_id,
        "base_model": row.base_model,
        "model_owner": row.owner,
        "is_lora": True,
        "corrupted": False,
        "lora_rank": row.lora.get("rank"),
        "last_request_time": iso_time(live.last_request_at if live else row.last_request_at),
        "last_checkpoint": checkpoint_json(last["weights"]) if "weights" in last else None,
        "last_sampler_checkpoint": checkpoint_json(last["sampler_weights"]) if "sampler_weights" in last else None,
        "user_metadata": None if row.user_metadata is None else {key: str(value) for key, value in row.user_metadata.items()},
    }


def _run(call: Call) -> RunRow:
    run_id = call.path("run_id")
    row = call.server.catalogue.run(run_id)
    if row is None or row.owner != call.owner:
        raise NotFound(f"no training run {run_id[:200]!r}")
    return row


def checkpoint_path(call: Call) -> TinkerPath:
    path = TinkerPath(call.path("run_id"), call.path("kind"), call.path("name"))
    if path.kind not in KINDS:
        raise NotFound(f"no kind of checkpoint {path.kind[:100]!r}: there are {', '.join(KINDS)}")
    return path


@routes.get("/training_runs")
async def listing(call: Call) -> Any:
    limit, offset = call.number("limit", 20, 10_000), call.number("offset", 0, 10**9)
    rows, total = call.server.catalogue.runs(call.owner, limit, offset)
    return {
        "training_runs": [run_json(call, row) for row in rows],
        "cursor": {"offset": offset, "limit": limit, "total_count": total},
    }


@routes.get("/training_runs/{run_id}")
async def get(call: Call) -> Any:
    return run_json(call, _run(call))


@routes.get("/training_runs/{run_id}/checkpoints")
async def checkpoints_of_run(call: Call) -> Any:
    rows = call.server.catalogue.checkpoints_of_run(_run(call).run_id)
    return {"checkpoints": [checkpoint_json(row) for row in rows], "cursor": None}


@routes.get("/checkpoints")
async def checkpoints(call: Call) -> Any:
    limit, offset = call.number("limit", 100, 10_000), call.number("offset", 0, 10**9)
    rows, total = call.server.catalogue.checkpoints(call.owner, limit, offset)
    return {
        "checkpoints": [checkpoint_json(row) for row in rows],
        "cursor": {"offset": offset, "limit": limit, "total_count": total},
    }


@routes.delete(CHECKPOINT)
async def delete(call: Call) -> Any:
    row = call.server.checkpoint(checkpoint_path(call), call.owner)
    await call.in_thread(call.server.catalogue.delete_checkpoint, row.path)
    return {}


@routes.post(CHECKPOINT + "/publish")
async def publish(call: Call) -> Any:
    row = call.server.checkpoint(checkpoint_path(call), call.owner)
    call.server.catalogue.publish_checkpoint(row.path, True)
    return {}


@routes.delete(CHECKPOINT + "/publish")
async def unpublish(call: Call) -> Any:
    row = call.server.checkpoint(checkpoint_path(call), call.owner)
    call.server.catalogue.publish_checkpoint(row.path, False)
    return {}


class Ttl(msgspec.Struct):
    ttl_seconds: int | None = None


@routes.put(CHECKPOINT + "/ttl")
async def ttl(call: Call) -> Any:
    request = await call.json(Ttl)
    check_ttl(request.ttl_seconds)
    server = call.server
    row = server.checkpoint(checkpoint_path(call), call.owner)
    at = None if request.ttl_seconds is None else server.catalogue.clock() + request.ttl_seconds
    server.catalogue.expire_checkpoint(row.path, at)
    server.schedule_expiry()
    return {}


@routes.put("/sessions/{session_id}/project")
async def project(call: Call) -> Any:
    raise InvalidRequest("projects are not kept by this server")
