"""Every text that a client can meet from scan: it names the datum, the input, what came and what is allowed."""

from __future__ import annotations

import numpy as np
import pytest

from spindle import codec
from spindle.codec import wire_pb2 as wire
from spindle.errors import InvalidRequest, MalformedBody
from tests.codec.bodies import body, csr, dense, raw_csr, request, simple, text_datum

LIMITS = codec.Limits(vocab_size=100)


def wide(values=(1, 2, 3), crow=(0, 2, 2, 3), col=(0, 1, 1), shape=(3, 2)) -> wire.Datum:
    return text_datum([1, 2, 3], target_tokens=raw_csr(np.array(values), crow, col, shape))


def with_tensor(change, name="weights") -> wire.Datum:
    datum = simple(3)
    change(datum.loss_fn_inputs[name])
    return datum


def chunk(kind: str, **fields) -> wire.Datum:
    datum = simple(3)
    getattr(datum.model_input.add(), kind).SetInParent()
    for name, value in fields.items():
        setattr(getattr(datum.model_input[1], kind), name, value)
    return datum


def span(field: str, **fields) -> wire.Datum:
    datum = simple(3)
    added = getattr(datum, field).add()
    if fields:
        added.prompt_tokens.CopyFrom(wire.TokenSpan(**fields))
    return datum


def empty_chunk() -> wire.Datum:
    datum = simple(3)
    datum.model_input.add()
    return datum


def many_names(n: int) -> wire.Datum:
    return text_datum([1], **{f"input{i}": dense([1.0]) for i in range(n)})


INVALID = {
    # tokens
    "token 1 is 100: token ids are 0 to 99": text_datum([1, 100]),
    "model_input: token 2 is -1: token ids are 0 to 99": text_datum([1, 2, -1]),
    "model_input has no tokens: at least one is needed": text_datum([]),
    "model_input chunk 1 is an image: not supported, only encoded_text is": chunk("image", data=b"x"),
    "model_input chunk 1 is dmel audio: not supported, only encoded_text is": chunk("dmel"),
    "model_input chunk 1 is empty: not supported, only encoded_text is": empty_chunk(),
    "model_input has 3 bytes of tokens, which is no whole number of int32": chunk("encoded_text", tokens=b"abc"),
    # tensors
    "target_tokens: value 2 is 100: token ids are 0 to 99": simple(3, target_tokens=dense([1, 2, 100])),
    "target_tokens: value 0 is -5: token ids are 0 to 99": simple(3, target_tokens=dense([-5, 2, 1])),
    "target_tokens: listed value 1 is 4294967296: token ids are 0 to 99": wide(values=(1, 1 << 32, 3)),
    "target_tokens has dtype float32: int64 or int32 is needed": simple(3, target_tokens=dense([1.0, 2.0, 3.0])),
    "weights: value 1 is nan: it must be finite": simple(3, weights=dense([1.0, np.nan, 0.0])),
    "weights: value 2 is inf: it must be finite": simple(3, weights=dense([1.0, 0.0, np.inf])),
    "weights: value 0 is -inf: it must be finite": simple(3, weights=dense([-np.inf, 0.0, 1.0])),
    "advantages: listed value 0 is nan: it must be finite": simple(3, advantages=raw_csr([np.nan], [0, 0, 0, 1], [1], [3, 2])),
    "weights has shape [2]: its first size must be the datum's 3 tokens": simple(3, weights=dense([1.0, 2.0])),
    "weights has shape [2, 2]: its first size must be the datum's 3 tokens": simple(3, weights=dense(np.ones((2, 2)))),
    "weights has shape [3, 1, ...]: [N] or [N, K] are allowed": simple(3, weights=dense(np.ones((3, 1, 1)))),
    "weights has shape [3, 0]: K must be 1 to 256": simple(3, weights=dense(np.ones((3, 0)))),
    "weights has shape [3, 257]: K must be 1 to 256": simple(3, weights=dense(np.ones((3, 257)))),
    "weights has shape [3, -4]: K must be 1 to 256": with_tensor(lambda t: t.shape.append(-4)),
    "weights has shape [3, 9223372036854775807]: K must be 1 to 256": with_tensor(lambda t: t.shape.append((1 << 63) - 1)),
    "weights has 3 values, but its shape [3, 2] asks for 6": with_tensor(lambda t: t.shape.append(2)),
    "weights has 5 bytes of data, which is no whole number of float32": with_tensor(lambda t: setattr(t, "dense", b"12345")),
    "weights has dtype number 0: 1 float32, 2 int64, 3 int32 and 4 bfloat16 are allowed": with_tensor(lambda t: setattr(t, "dtype", 0)),
    "weights has dtype number 9: 1 float32, 2 int64, 3 int32 and 4 bfloat16 are allowed": with_tensor(lambda t: setattr(t, "dtype", 9)),
    "weights holds neither dense nor sparse_csr data": with_tensor(lambda t: t.ClearField("dense")),
    # CSR
    "target_tokens has 3 crow_indices: 4 (rows + 1) are needed": wide(crow=(0, 2, 3)),
    "target_tokens has crow_indices that begin with 1: 0 is needed": wide(crow=(1, 2, 2, 3)),
    "target_tokens has crow_indices that end with 2: the 3 col_indices are needed": wide(crow=(0, 2, 2, 2)),
    "target_tokens has crow_indices that end with -1: the 3 col_indices are needed": wide(crow=(0, 2, 2, -1)),
    "target_tokens has crow_indices that fall after row 1: they must not": wide(crow=(0, 3, 2, 3)),
    "target_tokens has col_indices[1] = 2: 0 to 1 are allowed": wide(col=(0, 2, 1)),
    "target_tokens has col_indices[0] = -1: 0 to 1 are allowed": wide(col=(-1, 0, 1)),
    "target_tokens lists column 1 twice in row 0: list each cell once": wide(col=(1, 1, 1)),
    "target_tokens has 2 values for 3 col_indices: equal numbers are needed": wide(values=(1, 2)),
    "target_tokens is CSR without a shape: give [N, K]": wide(shape=()),
    "target_tokens is CSR of shape [3]: CSR needs [N, K]": wide(shape=(3,)),
    "target_tokens has shape [3, 1000000]: K must be 1 to 256": wide(shape=(3, 1_000_000)),
    "weights has CSR indices that are no whole number of int64": with_tensor(
        lambda t: (t.CopyFrom(csr([[1.0], [1.0], [1.0]])), setattr(t.sparse_csr, "col_indices", b"123456789"))
    ),
    # the rest
    "model_input_spans has a span that is neither prompt_tokens nor sampled_tokens": span("model_input_spans"),
    "loss_fn_input_spans has offset -1 and length 1: neither may be negative": span("loss_fn_input_spans", offset=-1, length=1),
}


@pytest.mark.parametrize("text", INVALID)
def test_bad_datum(text):
    with pytest.raises(InvalidRequest) as error:
        codec.scan(body(simple(2), INVALID[text]), None, LIMITS)
    assert str(error.value).startswith("datum 1: ") and text in str(error.value)
    assert (error.value.model_id, error.value.seq_id, error.value.category) == ("run:train:0", 3, "user")


REQUESTS = {
    "model_id is missing": request(simple(), model_id=""),
    "seq_id is 0: 1 or more is needed": request(simple(), seq_id=0),
    "seq_id is -2: 1 or more is needed": request(simple(), seq_id=-2),
    "loss_fn is missing": request(simple(), loss_fn=""),
    "data is empty: at least one datum is needed": request(),
    "loss_fn_config: x has no value": request(simple(), loss_fn_config_v2={"x": wire.LossConfigValue()}),
    "model_id has 257 bytes: at most 256 are allowed": request(simple(), model_id="m" * 257),
    "loss_fn has 257 bytes: at most 256 are allowed": request(simple(), loss_fn="l" * 257),
    "a loss input's name has 257 bytes: at most 256 are allowed": request(text_datum([1], **{"n" * 257: dense([1.0])})),
    "a loss_fn_config name has 257 bytes: at most 256 are allowed": request(simple(), loss_fn_config={"c" * 257: 1.0}),
    "loss_fn_config has more than 64 entries": request(simple(), loss_fn_config={f"c{i}": 1.0 for i in range(65)}),
    "datum 0: loss_fn_inputs of the request have more than 64 different names": request(many_names(65)),
}


@pytest.mark.parametrize("text", REQUESTS)
def test_bad_request(text):
    with pytest.raises(InvalidRequest) as error:
        codec.scan(REQUESTS[text].SerializeToString(), None, LIMITS)
    assert text in str(error.value)


def test_too_many_different_names():
    second = text_datum([1], other=dense([1.0]))
    with pytest.raises(InvalidRequest, match="datum 1: loss_fn_inputs of the request have more than 64 different names"):
        codec.scan(body(many_names(64), second))


def test_rejected_request_is_named_even_when_its_name_comes_last():
    bad = wire.ForwardBackwardRequest(data=[text_datum([500])]).SerializeToString()
    named = wire.ForwardBackwardRequest(model_id="late", seq_id=12).SerializeToString()
    with pytest.raises(InvalidRequest) as error:
        codec.scan(bad + named, None, LIMITS)
    assert (error.value.model_id, error.value.seq_id) == ("late", 12)
    with pytest.raises(InvalidRequest) as error:
        codec.scan(bad, None, LIMITS)
    assert (error.value.model_id, error.value.seq_id) == (None, 0)


MALFORMED = {
    "the body is empty": b"",
    "it ends inside a field": body(simple())[:-3],
    "a number has too many bytes": b"\x10" + b"\xff" * 11,
    "a field number is out of range": b"\x00\x01",
    "has wire type 6": b"\x0e",
    "a group ends that never began": b"\x0c",
    "groups nest too deep": b"\x83\x01" * 200,
    "model_id is not UTF-8": b"\x0a\x02\xc3\x28",
    "loss_fn is not UTF-8": body(simple()) + b"\x22\x01\xff",
    "a loss input's name is not UTF-8": body(simple()) + b"\x1a\x06" + b"\x12\x04\x0a\x02\xed\xa0",
    "a loss_fn_config text is not UTF-8": body(simple()) + b"\x3a\x08\x0a\x01a\x12\x03\x12\x01\xff",
    "an image's format is not UTF-8": body(simple()) + b"\x1a\x07\x0a\x05\x12\x03\x12\x01\xff",
    "Content-Encoding is 'gzip': zstd or identity is allowed": None,
}


@pytest.mark.parametrize("text", MALFORMED)
def test_malformed_body(text):
    raw = MALFORMED[text]
    with pytest.raises(MalformedBody) as error:
        codec.scan(body(simple()) if raw is None else raw, "gzip" if raw is None else None)
    assert text in str(error.value) and error.value.http_status == 400


def test_every_truncation_is_an_error():
    raw = body(text_datum([1, 2, 3], target_tokens=csr([[0, 3], [4, 0], [0, 0]]), weights=dense(np.ones((3, 2), np.float32))))
    whole = codec.scan(raw).fingerprint
    for n in range(len(raw)):
        try:
            assert codec.scan(raw[:n]).fingerprint != whole
        except (MalformedBody, InvalidRequest):
            pass


def test_random_bytes_never_pass():
    random = np.random.default_rng(0)
    for n in range(1, 400):
        for encoding in (None, "zstd"):
            with pytest.raises((MalformedBody, InvalidRequest)):
                codec.scan(random.bytes(n), encoding)


def test_body_must_be_a_buffer():
    with pytest.raises(TypeError):
        codec.scan("text")
    with pytest.raises(BufferError):
        codec.scan(memoryview(bytes(8))[::2])
    raw = body(simple())
    for given in (raw, bytearray(raw), memoryview(raw), np.frombuffer(raw, np.uint8)):
        assert codec.scan(given).num_tokens == 4
