"""Reading a body: whole, once, within what it declared."""

import asyncio

import pytest
from starlette.requests import Request

from spindle.errors import MalformedBody
from spindle.server.bodies import LARGE_BYTES, Receiving, Reservation, read_body


def read(parts: list[bytes], declared: int | None, limit: int = 16 << 20) -> bytes:
    waiting = [{"type": "http.request", "body": part, "more_body": True} for part in parts] + [{"type": "http.request", "body": b""}]

    async def receive():
        return waiting.pop(0)

    headers = [] if declared is None else [(b"content-length", str(declared).encode())]
    request = Request({"type": "http", "method": "POST", "headers": headers}, receive)
    room = Reservation(Receiving(1 << 30, 1 << 16))
    return bytes(asyncio.run(read_body(request, limit, 5.0, room)))


@pytest.mark.parametrize("size", [0, 1, LARGE_BYTES - 1, LARGE_BYTES, 3 * LARGE_BYTES + 5])
@pytest.mark.parametrize("says", [True, False])
def test_parts_come_out_as_they_went_in(size, says):
    body = bytes(range(256)) * (size // 256 + 1)
    body = body[:size]
    parts = [body[i : i + 65_537] for i in range(0, size, 65_537)]
    assert read(parts, size if says else None) == body


def test_a_trickle_is_cut_off():
    """Each byte comes in time, but a large body would hold its room for hours."""
    sent = 0

    async def receive():
        nonlocal sent
        sent += 1
        await asyncio.sleep(0.1)
        return {"type": "http.request", "body": b"x", "more_body": True}

    request = Request({"type": "http", "method": "POST", "headers": [(b"content-length", str(LARGE_BYTES).encode())]}, receive)
    with pytest.raises(MalformedBody, match=r"arrives too slowly: \d+ bytes so far; 4096 bytes a second are needed"):
        asyncio.run(read_body(request, LARGE_BYTES, 1.0, Reservation(Receiving(1 << 30, 1 << 16))))
    assert 2 <= sent <= 12


def test_more_than_was_declared_is_refused():
    with pytest.raises(MalformedBody, match="the body has"):
        read([b"x" * LARGE_BYTES, b"y"], LARGE_BYTES)


def test_more_than_is_allowed_is_refused_however_it_comes():
    for declared in (None, 3 * LARGE_BYTES):
        with pytest.raises(MalformedBody, match=f"at most {2 * LARGE_BYTES} are allowed"):
            read([b"x" * LARGE_BYTES] * 3, declared, limit=2 * LARGE_BYTES)
