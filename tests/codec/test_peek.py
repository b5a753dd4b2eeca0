"""peek: who a body is from, without reading it."""

from __future__ import annotations

import numpy as np
import pytest

from spindle import codec
from spindle.codec import wire_pb2 as wire
from spindle.errors import MalformedBody
from tests.codec.bodies import body, dense, simple, text_datum, zstd

N = 400_000
BIG = body(text_datum(np.random.default_rng(1).integers(0, 30_000, N), target_tokens=dense(np.arange(N))))


@pytest.mark.parametrize("encoding", [None, "zstd"])
@pytest.mark.parametrize("declared", [True, False])
def test_big_body_is_barely_opened(encoding, declared):
    given = zstd(BIG, declared) if encoding else BIG
    assert codec.peek(given, encoding) == ("run:train:0", 3)
    model_id, seq_id, inflated = codec.peek_stats(given, encoding)
    assert (model_id, seq_id) == ("run:train:0", 3) and inflated <= 128 << 10 and (inflated > 0) == (encoding == "zstd")


def test_only_the_head_matters():
    assert codec.peek(BIG[:200]) == ("run:train:0", 3)
    assert codec.peek(body(simple()) + b"\xff\xff") == ("run:train:0", 3)


def test_order_of_the_two_does_not_matter():
    assert codec.peek(b"\x10\x05" + b"\x0a\x01m" + b"\xff") == ("m", 5)


@pytest.mark.parametrize("encoding", [None, "zstd"])
def test_not_in_the_head(encoding):
    late = wire.ForwardBackwardRequest(data=[simple(20_000)]).SerializeToString() + body(simple())
    with pytest.raises(MalformedBody, match="model_id and seq_id are not in the first 131072 bytes of the body: write them before data"):
        codec.peek(zstd(late) if encoding else late, encoding)


def test_malformed():
    for raw, encoding in ((b"", None), (b"\0", None), (b"xxxx", "zstd"), (body(simple()), "zstd"), (b"\x0a\x01m", None)):
        with pytest.raises(MalformedBody):
            codec.peek(raw, encoding)


def test_a_model_id_that_is_no_text_is_refused():
    with pytest.raises(MalformedBody, match="model_id is not UTF-8"):
        codec.peek(b"\x10\x05" + b"\x0a\x03m\x93m" + b"\xff")
