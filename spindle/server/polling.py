"""retrieve_future, retrieve_futures, cancel_future: long polls that an answer wakes."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.responses import Response

from spindle.errors import InvalidRequest
from spindle.server.answers import JSON, PROTOBUF, encode_json
from spindle.server.bodies import Strict
from spindle.server.old_answers import as_json
from spindle.server.routing import Call, Routes

routes = Routes()


class Retrieve(msgspec.Struct):
    request_id: str
    allow_metadata_only: bool = False


@routes.post("/retrieve_future")
async def retrieve(call: Call) -> Response:
    request = await call.json(Retrieve)
    futures, settings = call.server.futures, call.server.settings
    entry = futures.get(request.request_id, call.owner)
    answer = entry.answer or await futures.wait(entry, settings.long_poll_s)
    if answer is None:
        pending = {"type": "try_again", "request_id": entry.request_id, "queue_state": "active"}
        return Response(encode_json(pending), media_type=JSON)
    if request.allow_metadata_only and answer.nbytes > settings.inline_payload_bytes:
        return Response(encode_json({"status": "complete_metadata", "response_payload_size": answer.nbytes}), media_type=JSON)
    futures.mark_read(entry)
    if answer.proto is None:
        return Response(answer.json, media_type=JSON)
    if PROTOBUF in call.request.headers.get("accept", ""):
        return Response(answer.proto, media_type=PROTOBUF)
    return Response(await asyncio.to_thread(as_json, entry.kind, answer.proto), media_type=JSON)


class Target(Strict):
    sampling_session_id: str
    cloned_sampler_id: int = 0
    type: str = ""


class RetrieveMany(Strict):
    target: Target
    prev_cursor: int = 0
    timeout: float | None = None
    retrieved_request_ids: list[str] = msgspec.field(default_factory=list)


@routes.post("/retrieve_futures")
async def retrieve_many(call: Call) -> Any:
    """Completions of one sampling client after a cursor; those up to it are trimmed."""
    request = await call.json(RetrieveMany)
    if request.timeout is not None and not request.timeout >= 0:
        raise InvalidRequest(f"timeout is {request.timeout}, allowed is 0 or more seconds")
    sampler = await call.server.sampler(request.target.sampling_session_id, call.owner)
    channel = sampler.channel(request.target.cloned_sampler_id)
    for request_id in request.retrieved_request_ids:
        call.server.futures.drop(request_id, call.owner)
    found = channel.after(request.prev_cursor)
    longest = call.server.settings.long_poll_s
    timeout_s = longest if request.timeout is None else min(request.timeout, longest)
    if not found and timeout_s > 0:
        await channel.wait(timeout_s)
        found = channel.after(request.prev_cursor)
    completions = [
        {"state": "failed", "request_id": item.request_id}
        if item.failed
        else {"state": "finished", "request_id": item.request_id, "response_payload_uncompressed_size": item.nbytes}
        for item in found
    ]
    return {"completions": completions, "cursor": found[-1].cursor if found else request.prev_cursor}


class Cancel(msgspec.Struct):
    request_id: str


@routes.post("/cancel_future")
async def cancel(call: Call) -> Any:
    """Stops sampling that nobody waits for any more; what is done stays done."""
    entry = call.server.futures.get((await call.json(Cancel)).request_id, call.owner)
    call.server.futures.cancel(entry)
    return {}
