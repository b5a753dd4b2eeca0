"""Saving and loading: save_weights, load_weights, save_weights_for_sampler, save_weights_external, weights_info, copy_weights."""

from __future__ import annotations

import functools
import os
import shutil
from typing import Any

from starlette.responses import Response

from spindle.errors import InvalidRequest, NotFound
from spindle.operations import LoadState, Publish, SaveState
from spindle.server.answers import encode_json
from spindle.server.bodies import Strict
from spindle.server.futures import Answer, acknowledge
from spindle.server.live import LiveModel, Weights
from spindle.server.models import ADAMW, begin_model, optimizer_type
from spindle.server.ordered import Address, submit_in_order
from spindle.server.routing import Call, Routes
from spindle.store.catalogue import UNNAMED, CheckpointRow, RunRow, SamplerRow, checkpoint_row
from spindle.store.checkpoint import read_description
from spindle.store.files import new_directory
from spindle.store.names import TinkerPath, check_name, check_ttl, parse_path

routes = Routes()


class Save(Strict):
    model_id: str
    path: str | None = None
    seq_id: int | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    type: str = ""


@routes.post("/save_weights")
async def save(call: Call) -> Response:
    saving = Saving(call, "weights", with_optimizer=True)
    return acknowledge(await submit_in_order(call, Save, saving.operation, saving.answer, "save_weights", slow_answer=True))


class Saving:
    """One named save: where its files go, and its listing once they are whole."""

    def __init__(self, call: Call, kind: str, with_optimizer: bool) -> None:
        self.server = call.server
        self.kind = kind
        self.with_optimizer = with_optimizer

    def operation(self, model: LiveModel, request: Any) -> SaveState:
        check_ttl(request.ttl_seconds)
        if request.path is None:
            raise InvalidRequest("path is missing: give the checkpoint a name")
        self.path = TinkerPath(model.model_id, self.kind, check_name(request.path))
        self.files = self.server.catalogue.new_checkpoint_directory(self.path)
        metadata = {"path": str(self.path), "optimizer_config": model.optimizer}
        return SaveState(self.files, with_optimizer=self.with_optimizer, metadata=metadata)

    def answer(self, model: LiveModel, request: Any, _: Any) -> Answer:
        """In a thread: the row is on disk before the client hears of the checkpoint."""
        row = checkpoint_row(self.server.catalogue, self.path, model.owner, self.files, request.ttl_seconds, request.user_metadata)
        self.server.catalogue.add_checkpoint(row, replace=getattr(request, "overwrite", False))
        if request.ttl_seconds is not None:
            self.server.loop.call_soon_threadsafe(self.server.schedule_expiry)
        kind = "save_weights" if self.kind == "weights" else "save_weights_for_sampler"
        return Answer(json=encode_json({"path": str(self.path), "type": kind}))


class SaveForSampler(Strict):
    model_id: str
    path: str | None = None
    sampling_session_seq_id: int | None = None
    kind: str = "snapshot"
    seq_id: int | None = None
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None
    type: str = ""


@routes.post("/save_weights_for_sampler")
async def save_for_sampler(call: Call) -> Response:
    """Named: files on disk. Without a name: a copy in memory and a sampling session on it, gone with its session."""
    body = await call.body()
    if (await call.decode(Unnamed, body)).path is not None:
        saving = Saving(call, "sampler_weights", with_optimizer=False)
        return acknowledge(
            await submit_in_order(call, SaveForSampler, saving.operation, saving.answer, "save_weights_for_sampler", body, slow_answer=True)
        )
    server = call.server
    published: dict[str, Any] = {}

    def operation(model: LiveModel, request: SaveForSampler) -> Publish:
        if request.sampling_session_seq_id is None or request.sampling_session_seq_id < 0:
            raise InvalidRequest("give path, a name, or sampling_session_seq_id, the number of the new sampling session")
        if request.kind not in ("snapshot", "inflight"):
            raise InvalidRequest(f"kind is {request.kind[:100]!r}, allowed: snapshot, inflight")
        published["row"] = SamplerRow(
            f"{model.session_id}:sample:{request.sampling_session_seq_id}",
            model.session_id,
            model.owner,
            server.catalogue.clock(),
            model.base_model,
            UNNAMED,
        )
        return Publish()

    def answer(model: LiveModel, request: SaveForSampler, snapshot: Any) -> Answer:
        row = published["row"]
        weights = Weights(snapshot, nbytes=snapshot.params.nbytes)
        server.loop.call_soon_threadsafe(_open_published, server, model, row, weights, request.kind)
        return Answer(json=encode_json({"sampling_session_id": row.sampler_id, "type": "save_weights_for_sampler"}))

    return acknowledge(await submit_in_order(call, SaveForSampler, operation, answer, "save_weights_for_sampler", body))


class Unnamed(Address):
    path: Any = None


def _open_published(server: Any, model: LiveModel, row: SamplerRow, weights: Weights, kind: str) -> None:
    """On the event loop, before the answer that names the sampler goes out: open it, if its session still lives."""
    session = server.sessions.get(model.session_id)
    if session is None:
        return
    key = row.sampler_id
    if kind == "inflight":
        model.inflight.snapshot, model.inflight.nbytes = weights.snapshot, weights.nbytes
        weights, key = model.inflight, model.model_id
    server.add_sampler(session, row, weights)
    server.published.hold(key, weights)


class Load(Strict):
    path: str
    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer: bool = False
    optimizer_config: dict[str, Any] | None = None
    weights_access_token: str | None = None
    type: str = ""


@routes.post("/load_weights")
async def load(call: Call) -> Response:
    body = await call.body()
    if (await call.decode(Sessioned, body)).session_id is not None:
        return create_from_checkpoint(call, await call.decode(Load, body), body)

    def operation(model: LiveModel, request: Load) -> LoadState:
        row = training_checkpoint(call, request)
        return LoadState(call.server.catalogue.files(row), request.optimizer)

    def answer(model: LiveModel, request: Load, _: Any) -> Answer:
        return Answer(json=encode_json({"path": request.path, "model_id": model.model_id, "type": "load_weights"}))

    return acknowledge(await submit_in_order(call, Load, operation, answer, "load_weights", body))


class Sessioned(Strict, forbid_unknown_fields=False):
    session_id: str | None = None


def training_checkpoint(call: Call, request: Load) -> CheckpointRow:
    """The checkpoint to train on from. Raises InvalidRequest naming the kind of path when it is of another kind."""
    kind = parse_path(request.path).kind
    if kind != "weights":
        raise InvalidRequest(
            f"path {request.path} is of kind {kind}, which has no state to train on: "
            "training starts from tinker://…/weights/…, which save_state makes"
        )
    return call.server.readable(request.path, call.owner, request.weights_access_token)


def create_from_checkpoint(call: Call, request: Load, body: bytes | memoryview) -> Response:
    """A model whose first request is a load: its shape comes from the checkpoint."""
    if request.model_seq_id is None or request.model_id is not None:
        raise InvalidRequest("with session_id give model_seq_id and no model_id: the load creates the model")
    server = call.server
    session = server.session(request.session_id or "", call.owner)
    row = training_checkpoint(call, request)
    run = server.catalogue.run(row.run_id)
    base_model = server.base_model(request.base_model or (run.base_model if run else server.name))
    saved = run.optimizer if run else ADAMW
    if request.optimizer and request.optimizer_config not in (None, saved):
        raise InvalidRequest(f"optimizer_config cannot differ from the restored optimizer state's, {saved}")
    config = saved if request.optimizer else request.optimizer_config or ADAMW
    files = server.catalogue.files(row)
    lora = read_description(files)["lora"]
    make = functools.partial(
        server.engine.create_adapter,
        lora["rank"],
        alpha=lora["alpha"],
        train_mlp=lora["train_mlp"],
        train_attn=lora["train_attn"],
        train_unembed=lora["train_unembed"],
        optimizer=optimizer_type(config),
        state=files,
        with_optimizer=request.optimizer,
    )
    return begin_model(
        call, session, request.model_seq_id, body, make, base_model, config, request.user_metadata, "load_weights", path=request.path
    )


class Info(Strict):
    tinker_path: str


@routes.post("/weights_info")
async def weights_info(call: Call) -> Any:
    row = call.server.readable((await call.json(Info)).tinker_path, call.owner)
    run = call.server.catalogue.run(row.run_id)
    files = call.server.catalogue.files(row)
    if run is not None and row.kind == "external_weights":  # merged or encrypted ones do not describe themselves
        description: dict[str, Any] = {"lora": run.lora}
    else:
        description = await call.in_thread(read_description, files)
    lora = description["lora"]
    return {
        "base_model": run.base_model if run else description["base_model"],
        "optimizer_config": run.optimizer if run else ADAMW,
        "is_lora": not any((files / f"config.json{end}").exists() for end in ("", ".age")),
        "lora_rank": lora["rank"],
        "train_unembed": lora["train_unembed"],
        "train_mlp": lora["train_mlp"],
        "train_attn": lora["train_attn"],
    }


class Copy(Strict):
    source_path: str
    session_id: str | None = None
    model_seq_id: int | None = None
    destination_project_id: str | None = None
    ttl_seconds: int | None = None
    weights_access_token: str | None = None


@routes.post("/copy_weights")
async def copy(call: Call) -> Any:
    """A copy of the caller's own, in a run that holds nothing else. Files are hard links: no byte is written twice."""
    request = await call.json(Copy)
    check_ttl(request.ttl_seconds)
    server = call.server
    token = request.weights_access_token or call.request.headers.get("x-tinker-weights-access-token")
    source = server.readable(request.source_path, call.owner, token)
    key = call.request.headers.get("x-idempotency-key", "")
    if request.session_id is not None and request.model_seq_id is not None:
        run_id = f"{server.session(request.session_id, call.owner).session_id}:train:{request.model_seq_id}"
    else:
        run_id = f"copy-{os.urandom(8).hex()}" if not key else "copy-" + _name_of(call.owner, key)
    path = TinkerPath(run_id, source.kind, source.name)
    if server.catalogue.run(run_id) is not None:
        try:
            server.catalogue.checkpoint(path)
        except NotFound:
            raise InvalidRequest(f"run {run_id} exists already and holds no {path.checkpoint_id}: give each copy its own number") from None
    else:
        run = server.catalogue.run(source.run_id)
        now = server.catalogue.clock()
        lora, optimizer = (run.lora, run.optimizer) if run else ({}, ADAMW)
        base_model = run.base_model if run else server.name
        files = server.catalogue.new_checkpoint_directory(path)
        await call.in_thread(_link, server.catalogue.files(source), files)
        row = checkpoint_row(server.catalogue, path, call.owner, files, request.ttl_seconds, source.user_metadata)
        await call.in_thread(server.catalogue.add_checkpoint, row)
        server.catalogue.add_run(RunRow(run_id, request.session_id or "", call.owner, now, now, base_model, lora, optimizer))
        server.schedule_expiry()
    return {"tinker_path": str(path)}


def _name_of(owner: str, key: str) -> str:
    import hashlib

    return hashlib.blake2b(f"{owner}\0{key}".encode(), digest_size=8).hexdigest()


def _link(source: Any, target: Any) -> None:
    with new_directory(target) as directory:
        for file in source.rglob("*"):
            place = directory / file.relative_to(source)
            if file.is_dir():
                place.mkdir(parents=True, exist_ok=True)
                continue
            place.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(file, place)
            except OSError:  # no hard links on this file system
                shutil.copyfile(file, place)
