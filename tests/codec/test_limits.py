"""Each bound of Limits, met and passed."""

from __future__ import annotations

import numpy as np
import pytest

from spindle import codec
from spindle.codec import wire_pb2 as wire
from spindle.errors import InvalidRequest, MalformedBody
from spindle.types import Datum
from tests.codec.bodies import body, csr, datum, dense, simple, text_datum, zstd


def spans(n: int) -> wire.Datum:
    out = simple(2)
    for _ in range(n):
        out.model_input_spans.add().sampled_tokens.length = 1
    return out


TWO = body(simple(3), simple(4))
WIDE = body(text_datum([1, 2], target_tokens=csr(np.eye(2, 6, dtype=int))))
CASES = [  # limit, what is just allowed, body, text
    ("max_datums", 2, TWO, "data has more than 1 datums: send it in several requests"),
    ("max_tokens", 7, TWO, "data has more than 6 tokens: send it in several requests"),
    ("max_sequence_length", 4, TWO, "datum 1: model_input has more than 3 tokens, the most that are allowed"),
    ("max_target_width", 6, WIDE, "datum 0: target_tokens has shape [2, 6]: K must be 1 to 5"),
    ("max_cells", 12, WIDE, "data has more than 11 cells (tokens x K): send it in several requests"),
    ("max_name_length", 13, TWO, "has 13 bytes: at most 12 are allowed"),
    ("max_input_names", 2, TWO, "datum 0: loss_fn_inputs of the request have more than 1 different names"),
    ("max_config_entries", 1, body(simple(), loss_fn_config={"a": 1.0}), "loss_fn_config has more than 0 entries"),
    ("max_spans", 3, body(spans(3)), "datum 0: the request has more than 2 provenance spans"),
    ("vocab_size", 5, TWO, "datum 1: model_input: token 3 is 4: token ids are 0 to 3"),
    ("max_body_bytes", len(TWO), TWO, f"the body has {len(TWO)} bytes: at most {len(TWO) - 1} are allowed"),
    ("max_inflated_bytes", len(TWO), TWO, f"the body has {len(TWO)} bytes: at most {len(TWO) - 1} are allowed"),
]


@pytest.mark.parametrize("limit, allowed, raw, text", CASES, ids=[case[0] for case in CASES])
def test_limit(limit, allowed, raw, text):
    if limit == "max_name_length":  # the two names of the body that are longest: 13 bytes each
        raw = body(simple(), model_id="m", loss_fn="cross_entropy")
    assert codec.scan(raw, None, codec.Limits(**{limit: allowed})).num_datums >= 1
    with pytest.raises((InvalidRequest, MalformedBody)) as error:
        codec.scan(raw, None, codec.Limits(**{limit: allowed - 1}))
    assert text in str(error.value)


def test_limits_hold_in_process_too():
    limits = codec.Limits(max_tokens=6)
    with pytest.raises(InvalidRequest, match="data has more than 6 tokens") as error:
        codec.scan_arrays("m", 4, [datum(3), datum(4)], "cross_entropy", limits=limits)
    assert (error.value.model_id, error.value.seq_id) == ("m", 4)


@pytest.mark.parametrize("declared", [True, False])
def test_inflated_size(declared):
    raw = body(simple(3), weights_are_long := text_datum(np.arange(5000), target_tokens=dense(np.arange(5000))))
    assert weights_are_long.ByteSize() > 50_000
    packed = zstd(raw, declared)
    assert codec.scan(packed, "zstd", codec.Limits(max_inflated_bytes=len(raw))).num_datums == 2
    with pytest.raises(MalformedBody, match=r"inflates to|the body is not readable zstd|ends inside a field"):
        codec.scan(packed, "zstd", codec.Limits(max_inflated_bytes=len(raw) - 1))


def test_vocabulary_unknown_still_refuses_negative_ids():
    with pytest.raises(InvalidRequest, match="token 0 is -1: token ids are 0 to 2147483647"):
        codec.scan(body(text_datum([-1])))
    assert codec.scan(body(text_datum([2**31 - 1]))).num_tokens == 1
    with pytest.raises(InvalidRequest, match="token 1 is 2147483648: token ids are 0 to 2147483647"):  # in process they may be int64
        codec.scan_arrays("run:train:0", 1, [Datum(np.array([2**31 - 1, 2**31]), {})], "cross_entropy")
    with pytest.raises(InvalidRequest, match="target_tokens: value 0 is -9223372036854775808"):
        codec.scan(body(text_datum([1], target_tokens=dense([-(2**63)]))))


def test_limits_check_themselves():
    for bad in ({"max_tokens": -1}, {"zstd_window_log_max": 40}, {"vocab_size": 2**31}, {"max_target_width": 2**21}, {"max_cells": 2**32}):
        with pytest.raises(ValueError, match=next(iter(bad)) if "max_tokens" not in bad else "limits must be 0 to"):
            codec.Limits(**bad)
    with pytest.raises(TypeError):
        codec.Limits(max_nonsense=1)
    assert codec.Limits().max_inflated_bytes == 512 << 20
