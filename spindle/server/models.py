"""Models: an adapter is made, described, let go."""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import msgspec

from spindle.errors import InvalidRequest
from spindle.future import Future
from spindle.server.answers import encode_json
from spindle.server.bodies import Strict
from spindle.server.futures import Answer, acknowledge
from spindle.server.live import LiveSession
from spindle.server.routing import Call, Routes
from spindle.server.state import Server
from spindle.store.catalogue import RunRow

routes = Routes()

ADAMW = {"type": "adamw"}


class LoraShape(Strict):
    rank: int = 32
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateModel(Strict):
    session_id: str
    model_seq_id: int
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraShape | None = None
    optimizer_config: dict[str, Any] | None = None
    type: str = ""


class ModelRequest(msgspec.Struct):
    model_id: str


@routes.post("/create_model")
async def create(call: Call) -> Any:
    body = await call.body()
    request = await call.decode(CreateModel, body)
    session = call.server.session(request.session_id, call.owner)
    base_model = call.server.base_model(request.base_model)
    optimizer = optimizer_type(request.optimizer_config)
    lora = request.lora_config or LoraShape()
    return begin_model(
        call,
        session,
        request.model_seq_id,
        body,
        functools.partial(
            call.server.engine.create_adapter,
            lora.rank,
            seed=lora.seed,
            train_mlp=lora.train_mlp,
            train_attn=lora.train_attn,
            train_unembed=lora.train_unembed,
            optimizer=optimizer,
        ),
        base_model,
        request.optimizer_config or ADAMW,
        request.user_metadata,
        "create_model",
    )


def begin_model(
    call: Call,
    session: LiveSession,
    model_seq_id: int,
    body: bytes | memoryview,
    make: Any,
    base_model: str,
    optimizer_config: dict[str, Any],
    user_metadata: dict[str, Any] | None,
    kind: str,
    **fields: Any,
) -> Any:
    """Make an adapter off the event loop; answers at once with its future."""
    server = call.server
    if not 0 <= model_seq_id < 1 << 53:
        raise InvalidRequest(f"model_seq_id is {model_seq_id}, allowed is 0 or more")
    model_id = f"{session.session_id}:train:{model_seq_id}"
    request_id = f"{model_id}:0"
    digest = hashlib.blake2b(body, digest_size=16).digest()
    entry = server.futures.repeat(request_id, call.owner, digest)
    if entry is None:
        server.futures.check_room()
        if server.catalogue.run(model_id) is not None:
            raise InvalidRequest(f"model_seq_id {model_seq_id} was used before in session {session.session_id}: give each model its own")
        future: Future[Any] = Future()
        server.spawn(_make(server, session, model_id, make, base_model, optimizer_config, user_metadata, future))
        entry = server.futures.add(
            request_id,
            call.owner,
            model_id,
            future,
            lambda _: Answer(json=encode_json({"model_id": model_id, "type": kind, **fields})),
            digest,
            kind,
            model_id=model_id,
        )
    return acknowledge(entry)


async def _make(
    server: Server,
    session: LiveSession,
    model_id: str,
    make: Any,
    base_model: str,
    optimizer_config: dict[str, Any],
    user_metadata: dict[str, Any] | None,
    future: Future[Any],
) -> None:
    try:
        handle = await server.loop.run_in_executor(
            server.io, lambda: make(model_id=model_id, client=session.owner, session=session.session_id)
        )
        if future.cancelled():  # the client was told that it is: nothing may be left
            server.engine.unload(model_id)
            return
        if session.session_id not in server.sessions:
            server.engine.unload(model_id)
            raise InvalidRequest(f"session {session.session_id} ended while its model was made")
        now = server.catalogue.clock()
        lora = {
            "rank": handle.lora.rank,
            "train_mlp": handle.lora.train_mlp,
            "train_attn": handle.lora.train_attn,
            "train_unembed": handle.lora.train_unembed,
        }
        try:
            server.add_model(
                session, RunRow(model_id, session.session_id, session.owner, now, now, base_model, lora, optimizer_config, user_metadata)
            )
        except BaseException:  # the catalogue's disk is full: nobody would ever free the adapter
            server.engine.unload(model_id)
            raise
        future.settle(model_id)
    except BaseException as error:
        future.fail(error)


def optimizer_type(config: dict[str, Any] | None) -> str:
    """ "adamw" or "dimuon". Raises InvalidRequest saying what there is."""
    config = config or ADAMW
    kind: Any = config.get("type")
    known: dict[Any, set[str]] = {"adamw": {"type"}, "dimuon": {"type", "version"}}
    if kind not in known:
        raise InvalidRequest(f"optimizer_config.type is {str(kind)[:100]!r}, allowed: adamw, dimuon")
    if extra := sorted(config.keys() - known[kind]):
        raise InvalidRequest(f"optimizer_config of {kind} has the unknown field {extra[0][:100]!r}")
    if kind == "dimuon" and config.get("version", 1) != 1:
        raise InvalidRequest(f"optimizer_config.version is {str(config['version'])[:100]}, allowed: 1")
    return kind


@routes.post("/get_info")
async def info(call: Call) -> Any:
    model = call.server.model((await call.json(ModelRequest)).model_id, call.owner)
    arch = getattr(call.server.engine.model.config, "model_type", None)
    return {
        "type": "get_info",
        "model_data": {
            "arch": arch,
            "model_name": model.base_model,
            "tokenizer_id": call.server.settings.tokenizer_id or model.base_model,
        },
        "model_id": model.model_id,
        "optimizer_config": model.optimizer,
        "is_lora": True,
        "lora_rank": model.lora_rank,
        "model_name": model.base_model,
    }


@routes.post("/unload_model")
async def unload(call: Call) -> Any:
    model = call.server.model((await call.json(ModelRequest)).model_id, call.owner)
    call.server.unload_model(model.model_id)
    future: Future[Any] = Future()
    future.settle(None)
    answer = Answer(json=encode_json({"model_id": model.model_id, "type": "unload_model"}))
    entry = call.server.futures.add(
        f"{model.model_id}:unload", call.owner, model.model_id, future, lambda _: answer, model_id=model.model_id
    )
    return acknowledge(entry)
