"""Sampled logprobs kept by sequence id."""

from __future__ import annotations

import numpy as np
import pytest

from spindle.errors import NotFound
from spindle.sampling import Sampler, SampleRecords
from tests.sampling.helpers import base_of, prompts, request, run
from tests.tiny import tiny_llama


def test_a_finished_sample_is_recorded_when_asked():
    sampler = Sampler(base_of(tiny_llama()))
    prompt = prompts(1)[0]
    fields = dict(temperature=1.0, num_samples=2, session="s")
    output, _ = run(
        sampler,
        request(prompt, 6, sequence_ids=["s:0", "s:1"], record_stability_info=True, **fields),
        request(prompt, 6, sequence_ids=["s:2", "s:3"], **fields),
    )
    for name, sequence in zip(("s:0", "s:1"), output.sequences, strict=True):
        record = sampler.records.get(name, "s")
        np.testing.assert_array_equal(record.tokens, sequence.tokens)
        np.testing.assert_array_equal(record.logprobs, sequence.logprobs)
    with pytest.raises(NotFound, match=r"sequence_id 's:2' names no recorded sample of this session; .* record_stability_info=True"):
        sampler.records.get("s:2", "s")
    with pytest.raises(NotFound, match="'s:0'"):
        sampler.records.get("s:0", "another session")


def test_records_expire_and_are_bounded():
    now = [0.0]
    records = SampleRecords(keep_s=100, max_bytes=5 * 1056, max_session_bytes=3 * 1056, clock=lambda: now[0])
    tokens, logprobs = np.zeros(100, np.int64), np.zeros(100, np.float64)
    for i in range(4):
        records.add(f"a{i}", tokens, logprobs, "a")
    assert len(records) == 3 and records.get("a3", "a").tokens.dtype == np.int32
    with pytest.raises(NotFound):
        records.get("a0", "a")  # its session's oldest
    for i in range(3):
        records.add(f"b{i}", tokens, logprobs, "b")
    assert records.nbytes == 5 * 1056
    with pytest.raises(NotFound):
        records.get("a1", "a")  # the oldest of all
    records.add("b2", tokens[:50], logprobs[:50], "b")  # the same id again
    assert len(records) == 5 and len(records.get("b2", "b").tokens) == 50
    now[0] = 101
    with pytest.raises(NotFound, match=r"kept for 0\.0277778 hours"):
        records.get("b2", "b")
    assert len(records) == 0 and records.nbytes == 0
    records.add("c", tokens, logprobs)
    records.forget_session(None)
    assert records.nbytes == 0
