"""Prompts are prefilled once: across the samples of a request and across requests."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from spindle.sampling import Sampler
from tests.sampling.helpers import base_of, drain, greedy, prompts, random_snapshot, request, run
from tests.tiny import tiny_llama


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


@pytest.fixture(scope="module")
def base(model):
    return base_of(model)


def test_samples_of_a_request_share_its_prompt(base):
    sampler = Sampler(base)
    prompt = prompts(1, low=50, high=51)[0]
    output = run(sampler, request(prompt, 4, num_samples=100, temperature=1.0))[0]
    assert sampler.stats()["prefilled_tokens"] < 50 + 2
    assert output.prompt_cache_hit_tokens == 0


def test_requests_share_prompts_and_beginnings(model, base):
    sampler = Sampler(base)
    prompt, tail = prompts(2, low=60, high=61)
    (first,) = run(sampler, request(prompt, 12))
    assert first.prompt_cache_hit_tokens == 0
    same, longer, other_tail = run(
        sampler, request(prompt, 12), request(np.concatenate([prompt, tail]), 12), request(np.concatenate([prompt[:40], tail]), 12)
    )
    assert same.prompt_cache_hit_tokens == 59  # all but the token whose output is wanted
    assert longer.prompt_cache_hit_tokens == 60
    assert other_tail.prompt_cache_hit_tokens == 40
    np.testing.assert_array_equal(same.sequences[0].tokens, first.sequences[0].tokens)
    np.testing.assert_array_equal(longer.sequences[0].tokens, greedy(model, np.concatenate([prompt, tail]), 12))
    np.testing.assert_array_equal(other_tail.sequences[0].tokens, greedy(model, np.concatenate([prompt[:40], tail]), 12))


def test_requests_that_arrive_together_prefill_a_shared_prompt_once(base):
    sampler = Sampler(base)
    prompt = prompts(1, low=60, high=61)[0]
    outputs = run(sampler, *(request(prompt, 5, temperature=1.0, seed=i) for i in range(8)))
    assert [o.prompt_cache_hit_tokens for o in outputs] == [0] + [59] * 7
    assert sampler.stats()["prefilled_tokens"] == 60 + 7
    off = Sampler(base, prefix_bytes=0)  # nothing to wait for: all at once
    run(off, *(request(prompt, 5) for _ in range(8)))
    assert off.stats()["steps"] == 5


def test_the_next_turn_begins_with_what_was_sampled(model, base):
    sampler = Sampler(base)
    prompt, question = prompts(2, low=30, high=31)
    answer = run(sampler, request(prompt, 40))[0].sequences[0].tokens
    turn = np.concatenate([prompt, answer, question])
    output = run(sampler, request(turn, 8))[0]
    assert output.prompt_cache_hit_tokens == 30 + 39  # the last sampled token never was fed
    np.testing.assert_array_equal(output.sequences[0].tokens, greedy(model, turn, 8))


def test_snapshots_do_not_share(base):
    sampler = Sampler(base)
    prompt = prompts(1, low=40, high=41)[0]
    one, two = random_snapshot(base, 1), random_snapshot(base, 2)
    run(sampler, request(prompt, 3, snapshot=one))
    outputs = run(sampler, request(prompt, 3, snapshot=two), request(prompt, 3), request(prompt, 3, snapshot=one))
    assert [o.prompt_cache_hit_tokens for o in outputs] == [0, 0, 39]
    sampler.forget(one)
    assert run(sampler, request(prompt, 3, snapshot=one))[0].prompt_cache_hit_tokens == 0


def test_scoring_the_prompt_takes_over_only_what_is_not_scored(base):
    sampler = Sampler(base)
    prompt = prompts(1, low=60, high=61)[0]
    whole = run(sampler, request(prompt, 1, prompt_logprobs=True))[0]
    asks = ({}, {"prompt_logprobs_last_n": 10})
    again, last = run(sampler, *(request(prompt, 1, prompt_logprobs=True, **fields) for fields in asks))
    assert again.prompt_cache_hit_tokens == 0 and last.prompt_cache_hit_tokens == 49
    np.testing.assert_allclose(last.prompt_logprobs[-10:], whole.prompt_logprobs[-10:], atol=1e-5)
    assert np.isnan(last.prompt_logprobs[:-10]).all()


def test_kept_prompts_are_bounded(base):
    sampler = Sampler(base, prefix_bytes=100_000)
    for prompt in prompts(20, low=50, high=60):
        run(sampler, request(prompt, 2))
        assert sampler.stats()["prefix_bytes"] <= 100_000
    assert sampler.stats()["prefix_bytes"] > 50_000
    newest = prompts(20, low=50, high=60)[-1]
    assert run(sampler, request(newest, 2))[0].prompt_cache_hit_tokens == len(newest) - 1
    off = Sampler(base, prefix_bytes=0)
    run(off, request(newest, 2))
    assert run(off, request(newest, 2))[0].prompt_cache_hit_tokens == 0


def test_a_longer_prompt_takes_the_place_of_its_beginning(base):
    sampler = Sampler(base)
    prompt = prompts(1, low=100, high=101)[0]
    for n in range(20, 100, 10):
        run(sampler, request(prompt[:n], 2))
    assert len(sampler._prefixes) == 1
    futures = [sampler.submit(request(prompt[:64], 2))]
    assert drain(sampler, futures)[0].prompt_cache_hit_tokens == 63


def test_a_kept_prompt_does_not_keep_its_snapshot(base):
    sampler = Sampler(base)
    prompt = np.arange(2, 42)
    snapshot = random_snapshot(base, 1)
    run(sampler, request(prompt, 3, snapshot=snapshot))
    held = sampler.stats()["prefix_bytes"]
    gone = weakref.ref(snapshot)
    del snapshot
    gc.collect()
    assert gone() is None and held > 0
    run(sampler, request(prompt, 3))
    assert sampler.stats()["prefix_bytes"] == held  # the base model's took its place
