"""create_custom_loss: a traced loss is checked, compiled from allowed operations only, and named."""

from __future__ import annotations

import functools
import hashlib
from typing import Any

from starlette.responses import Response

from spindle import losses
from spindle.errors import InvalidRequest
from spindle.future import Future
from spindle.server.answers import encode_json
from spindle.server.bodies import Strict
from spindle.server.futures import Answer, acknowledge
from spindle.server.routing import Call, Routes

routes = Routes()


class CreateCustomLoss(Strict):
    session_id: str
    custom_loss_seq_id: int
    name: str
    inputs: list[dict[str, Any]]
    graph: dict[str, Any]
    type: str = ""


@routes.post("/create_custom_loss")
async def create(call: Call) -> Response:
    """Answers at once; a loss that is not allowed is a failed future, as everything else about it is."""
    body = await call.body()
    request = await call.decode(CreateCustomLoss, body)
    server = call.server
    session = server.session(request.session_id, call.owner)
    if request.custom_loss_seq_id < 0:
        raise InvalidRequest(f"custom_loss_seq_id is {request.custom_loss_seq_id}, allowed is 0 or more")
    request_id = f"{session.session_id}:loss:{request.custom_loss_seq_id}"
    digest = hashlib.blake2b(body, digest_size=16).digest()
    entry = server.futures.repeat(request_id, call.owner, digest)
    if entry is None:
        start: Future[None] = Future()
        where = session.session_id, call.owner, server.settings.custom_losses
        make = functools.partial(losses.create_custom, request.name, request.inputs, request.graph, *where)
        future = start.then(lambda _: make(), server.io)
        entry = server.futures.add(request_id, call.owner, session.session_id, future, _answer, digest, "create_custom_loss")
        start.settle(None)
    return acknowledge(entry)


def _answer(loss_id: str) -> Answer:
    return Answer(json=encode_json({"loss_id": loss_id, "type": "create_custom_loss"}))
