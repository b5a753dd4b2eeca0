"""JSON requests that run in their model's order, seq_id by seq_id.

Once a body has named a live model and a seq_id, whatever else is wrong with it becomes a failed future that takes its
place in the order. A 4xx would leave a hole: the SDK sends the first chunk of a call last, and never when one before it was refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from spindle.errors import Conflict, InvalidRequest, UserError
from spindle.future import Future
from spindle.operations import Operation
from spindle.server.bodies import decode
from spindle.server.futures import Answer, Entry
from spindle.server.live import LiveModel
from spindle.server.routing import Call

__all__ = ["submit_in_order"]

T = TypeVar("T")


class Address(msgspec.Struct):
    model_id: str
    seq_id: int | None = None


def checked_seq_id(seq_id: int | None) -> int:
    if seq_id is None or not 1 <= seq_id < 1 << 31:
        raise InvalidRequest(f"seq_id is {seq_id}: the requests of a model are numbered from 1, in the order they are to run")
    return seq_id


async def submit_in_order(
    call: Call,
    kind: type[T],
    operation: Callable[[LiveModel, T], Operation],
    answer: Callable[[LiveModel, T, Any], Answer],
    name: str,
    body: bytes | memoryview | None = None,
    on_settled: Callable[[Entry], None] | None = None,
    slow_answer: bool = False,
) -> Entry:
    """Decode, queue, register. ``slow_answer``: making the answer touches the disk, so it is done by the server's own threads."""
    server = call.server
    body = await call.body() if body is None else body
    model_id, seq_id, digest, request = await call.off_loop(len(body), _read, kind, body)  # from here on without a pause: repeats may come
    model = server.model(model_id, call.owner)
    request_id = f"{model.model_id}:{seq_id}"
    entry = server.futures.repeat(request_id, call.owner, digest)
    if entry is not None:
        return entry
    server.futures.check_room()
    future: Future[Any]
    try:
        if isinstance(request, UserError):
            raise request
        future = server.engine.submit_operation(model.model_id, seq_id, operation(model, request), fingerprint=digest)
    except Conflict:
        raise
    except UserError as error:
        future = server.engine.reject(model.model_id, seq_id, error)
        return server.futures.add(request_id, call.owner, model.model_id, future, _never, digest, name, on_settled, model_id=model.model_id)

    def finish(value: Any) -> Answer:
        return answer(model, request, value)

    if slow_answer:
        future = future.then(finish, server.io)
        return server.futures.add(request_id, call.owner, model.model_id, future, _same, digest, name, on_settled, model_id=model.model_id)
    return server.futures.add(request_id, call.owner, model.model_id, future, finish, digest, name, on_settled, model_id=model.model_id)


def _read(kind: type[T], body: bytes | memoryview) -> tuple[str, int, bytes, T | UserError]:
    """model_id, seq_id, digest of the body, and the request or what is wrong with it. Raises when it names no model and seq_id."""
    address = decode(Address, body)
    seq_id = checked_seq_id(address.seq_id)
    digest = hashlib.blake2b(body, digest_size=16).digest()
    try:
        return address.model_id, seq_id, digest, decode(kind, body)
    except UserError as error:
        return address.model_id, seq_id, digest, error


def _same(answer: Answer) -> Answer:
    return answer


def _never(value: Any) -> Answer:
    raise AssertionError(f"a rejected request had a result: {value!r}")
