"""Sampling sessions and asample."""

from __future__ import annotations

import hashlib
import uuid
from typing import Any

import numpy as np
from starlette.responses import Response

from spindle import codec
from spindle.errors import InvalidRequest
from spindle.server.bodies import Strict, decode
from spindle.server.futures import Answer, Entry, acknowledge
from spindle.server.live import LiveSampler, usable
from spindle.server.old_json import JsonTensor, Prompt
from spindle.server.routing import Call, Routes
from spindle.store.catalogue import SamplerRow
from spindle.types import SampleOutput, SamplingParams, TensorData

routes = Routes()

CLONE_BLOCK = 1_000_000_000  # seq_ids of one client of a sampling session


class CreateSamplingSession(Strict):
    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None
    type: str = ""


@routes.post("/create_sampling_session")
async def create(call: Call) -> Any:
    request = await call.json(CreateSamplingSession)
    server = call.server
    session = server.session(request.session_id, call.owner)
    if request.sampling_session_seq_id < 0:
        raise InvalidRequest(f"sampling_session_seq_id is {request.sampling_session_seq_id}, allowed is 0 or more")
    sampler_id = f"{session.session_id}:sample:{request.sampling_session_seq_id}"
    base_model = await _base_model(call, request.base_model, request.model_path)
    existing = server.samplers.get(sampler_id)
    if existing is None:
        weights = await server.weights_of(request.model_path, call.owner)
        row = SamplerRow(sampler_id, session.session_id, call.owner, server.catalogue.clock(), base_model, request.model_path)
        existing = server.samplers.get(sampler_id) or server.add_sampler(session, row, weights)
    if (existing.base_model, existing.model_path) != (base_model, request.model_path):
        raise InvalidRequest(
            f"sampling_session_seq_id {request.sampling_session_seq_id} was used before for other weights: give each its own"
        )
    return {"type": "create_sampling_session", "sampling_session_id": sampler_id}


async def _base_model(call: Call, base_model: str | None, model_path: str | None) -> str:
    if model_path is None:
        if base_model is None:
            raise InvalidRequest("give base_model or model_path: which weights to sample from")
        return call.server.base_model(base_model)
    run = call.server.catalogue.run(call.server.readable(model_path, call.owner).run_id)
    return call.server.base_model(base_model or (run.base_model if run else call.server.name))


class Join(Strict):
    sampling_session_id: str
    type: str = ""


@routes.post("/join_sampling_session")
async def join(call: Call) -> Any:
    sampler = await call.server.sampler((await call.json(Join)).sampling_session_id, call.owner)
    return {"type": "join_sampling_session", "client_counter": call.server.catalogue.join_sampler(sampler.sampler_id)}


@routes.get("/samplers/{sampler_id}")
async def get(call: Call) -> Any:
    sampler_id = call.path("sampler_id")
    row = call.server.catalogue.sampler(sampler_id)
    if row is None or row.owner != call.owner:
        row_or_sampler: Any = await call.server.sampler(sampler_id, call.owner)
    else:
        row_or_sampler = row
    return {"sampler_id": sampler_id, "base_model": row_or_sampler.base_model, "model_path": row_or_sampler.model_path or None}


class Params(Strict):
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class Sample(Strict):
    prompt: Prompt
    sampling_params: Params
    num_samples: int = 1
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str | None = None
    seq_id: int | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: JsonTensor | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None
    type: str = ""


@routes.post("/asample")
async def asample(call: Call) -> Response:
    server = call.server
    body = await call.body(server.settings.max_json_bytes)
    request, digest, prompt, target = await call.off_loop(len(body), _read_sample, body)
    sampler: LiveSampler | None = None
    if request.sampling_session_id is not None:
        if request.seq_id is None or not 0 <= request.seq_id < 1 << 63:
            raise InvalidRequest(f"seq_id is {request.seq_id}: with sampling_session_id number the requests from 0")
        sampler = await server.sampler(request.sampling_session_id, call.owner)
        request_id = f"{sampler.sampler_id}:{request.seq_id}"
        server.published.use(sampler.sampler_id)
        snapshot = usable(sampler.weights, sampler.sampler_id)
    else:
        await _base_model(call, request.base_model, request.model_path)
        request_id = f"sample-{uuid.uuid4()}"
        snapshot = (await server.weights_of(request.model_path, call.owner)).snapshot
    entry = server.futures.repeat(request_id, call.owner, digest)
    if entry is not None:
        return acknowledge(entry)
    sequence_ids = [f"{request_id}:{index}" for index in range(min(max(request.num_samples, 0), 1 << 16))]
    future = server.engine.sample(
        snapshot,
        prompt,
        SamplingParams(**{name: getattr(request.sampling_params, name) for name in Params.__struct_fields__}),
        request.num_samples,
        prompt_logprobs=bool(request.prompt_logprobs),
        prompt_logprobs_last_n=request.prompt_logprobs_last_n,
        topk_prompt_logprobs=request.topk_prompt_logprobs,
        topk_sample_logprobs=request.topk_sample_logprobs,
        target_prompt_logprobs=target,
        prompt_alt_tokens_k=request.prompt_alt_tokens_k,
        record_stability_info=bool(request.record_stability_info),
        sequence_ids=sequence_ids,
        session=sampler.session_id if sampler else None,
    )
    scope = sampler.sampler_id if sampler else request_id
    settled = _announce(call, sampler, request.seq_id or 0) if sampler else None
    entry = server.futures.add(
        request_id, call.owner, scope, future, _sample_answer, digest, "sample", settled, sample_sequence_ids=sequence_ids
    )
    return acknowledge(entry)


def _read_sample(body: bytes | memoryview) -> tuple[Sample, bytes, np.ndarray, TensorData | None]:
    """The request, the digest of its body, its prompt [n] int64 and what it asks of the prompt's targets."""
    request = decode(Sample, body)
    target = request.target_prompt_logprobs
    return (
        request,
        hashlib.blake2b(body, digest_size=16).digest(),
        request.prompt.tokens(),
        None if target is None else target.value("target_prompt_logprobs"),
    )


def _announce(call: Call, sampler: LiveSampler, seq_id: int) -> Any:
    server = call.server

    def settled(entry: Entry) -> None:
        server.settled(sampler, seq_id // CLONE_BLOCK, entry)

    return settled


def _sample_answer(output: SampleOutput) -> Answer:
    return Answer(proto=codec.encode_sample_response(output))
