"""forward, forward_backward, optim_step."""

from __future__ import annotations

import functools
import json
import math
from collections import deque
from collections.abc import Callable
from typing import Any

from starlette.responses import Response

from spindle import losses
from spindle.errors import InvalidRequest, MalformedBody, UserError
from spindle.operations import OptimStep
from spindle.server.answers import PROTOBUF
from spindle.server.bodies import Strict
from spindle.server.futures import Answer, acknowledge
from spindle.server.live import LiveModel
from spindle.server.old_json import training_body
from spindle.server.ordered import submit_in_order
from spindle.server.routing import Call, Routes
from spindle.types import AdamParams, DimuonParams, OptimStepOutput

routes = Routes()


@routes.post("/forward_backward")
async def forward_backward(call: Call) -> Response:
    headers = call.request.headers
    body = await call.body(call.server.settings.max_body_bytes)
    content_type = headers.get("content-type", "").partition(";")[0].strip()
    scan = call.server.engine.scan
    if content_type == PROTOBUF:
        encoding = headers.get("content-encoding")
        return await train(call, len(body), lambda: scan(body, encoding))
    if content_type == "application/json":
        return await train(call, len(body), lambda: scan(training_body(body, forward_only=False)))
    raise MalformedBody(f"Content-Type is {content_type[:100]!r}, allowed: {PROTOBUF}")


@routes.post("/forward")
async def forward(call: Call) -> Response:
    """The JSON request of old clients; new ones send forward_backward with forward_only."""
    body = await call.body(call.server.settings.max_body_bytes)
    return await train(call, len(body), lambda: call.server.engine.scan(training_body(body, forward_only=True)))


async def train(call: Call, nbytes: int, scan: Callable[[], Any]) -> Response:
    """Scan, queue, answer with the future. Small bodies are scanned here and answered by the device's thread; others have threads."""
    server = call.server
    server.futures.check_room()
    thread = server.scanners if nbytes >= server.settings.inline_scan_bytes else None
    try:
        request = scan() if thread is None else await server.loop.run_in_executor(thread, scan)
        losses.check_custom_owner(request, call.owner)
    except InvalidRequest as error:
        if not error.model_id or error.seq_id < 1:
            raise
        model = server.model(error.model_id, call.owner)
        future = server.engine.reject(model.model_id, error.seq_id, error)
        seq_id, tokens, curve = error.seq_id, 0, None
    else:
        model = server.model(request.model_id, call.owner)
        seq_id, tokens = request.seq_id, request.num_tokens
        curve = None if request.forward_only else model.losses
        future = server.engine.enqueue(request, encoded=True)
        server.engine.scheduler.let_begin()
    request_id = f"{model.model_id}:{seq_id}"
    entry = server.futures.same(request_id, future)
    if entry is None:
        entry = server.futures.add(
            request_id,
            call.owner,
            model.model_id,
            future,
            functools.partial(_training_answer, curve, tokens),
            kind="forward_backward",
            thread=thread,  # a device does not wait while a large answer is written
            model_id=model.model_id,
        )
    return acknowledge(entry)


def _training_answer(curve: deque[float] | None, tokens: int, result: Any) -> Answer:
    if curve is not None and tokens:
        curve.append(result.metrics["loss:sum"] / tokens)
    return Answer(proto=result.encode())


class Adam(Strict):
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class Dimuon(Strict):
    learning_rate: float
    grad_clip_norm: float = 0.0
    beta1: float = 0.9
    damping: float | None = None
    rank_lr_correction_exponent: float | None = None
    type: str = "dimuon"


class Step(Strict):
    model_id: str
    seq_id: int | None = None
    adam_params: Adam | None = None
    optimizer_params: Dimuon | None = None
    optim_params: Adam | None = None
    type: str = ""


@routes.post("/optim_step")
async def optim_step(call: Call) -> Response:
    return acknowledge(await submit_in_order(call, Step, _step, _step_answer, "optim_step"))


def _step(model: LiveModel, request: Step) -> OptimStep:
    given = [params for params in (request.adam_params, request.optim_params, request.optimizer_params) if params is not None]
    if len(given) != 1:
        raise InvalidRequest("give one of adam_params and optimizer_params")
    values = {name: getattr(given[0], name) for name in given[0].__struct_fields__ if name != "type"}
    if isinstance(given[0], Dimuon):
        if given[0].type != "dimuon":
            raise InvalidRequest(f"optimizer_params.type is {given[0].type[:100]!r}, allowed: dimuon")
        check_step(values)
        return OptimStep(DimuonParams(**values))
    check_step(values)
    return OptimStep(AdamParams(**values))


def check_step(values: dict[str, Any]) -> None:
    """Raises UserError for what torch would refuse, naming the field."""
    for name, value in values.items():
        if value is None:
            continue
        if not math.isfinite(value):
            raise UserError(f"{name} is {value}, allowed are finite numbers")
        if name in ("beta1", "beta2") and not 0 <= value < 1:
            raise UserError(f"{name} is {value}, allowed is 0 up to but not 1")
        if name in ("learning_rate", "eps", "weight_decay", "damping") and value < 0:
            raise UserError(f"{name} is {value}, allowed is 0 or more")


def _step_answer(model: LiveModel, request: Step, output: OptimStepOutput) -> Answer:
    # The SDK's reader takes NaN and Infinity, which a skipped step reports; strict JSON has no word for them.
    return Answer(json=json.dumps({"type": "optim_step", "metrics": output.metrics}).encode())
