"""Tokens and logprobs against transformers on the same weights."""

from __future__ import annotations

import numpy as np
import pytest

from spindle.sampling import Sampler
from tests.sampling.helpers import base_of, byte_tokenizer, greedy, log_softmax, merged, prompts, random_snapshot, request, run
from tests.tiny import tiny_llama, tiny_qwen3

MODELS = {
    "llama": tiny_llama,
    "llama-tied": lambda: tiny_llama(tied=True),
    "llama-rope-scaling": lambda: tiny_llama(
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    ),
    "qwen3": tiny_qwen3,
}  # fmt: skip


@pytest.fixture(scope="module", params=MODELS)
def pair(request):
    model = MODELS[request.param]()
    return model, base_of(model)


def sampled_logprobs(model, prompt, tokens, temperature=1.0):
    table = log_softmax(model, np.concatenate([prompt, tokens]), temperature)
    return table[np.arange(len(prompt) - 1, len(prompt) + len(tokens) - 1), tokens]


def test_greedy_is_token_for_token_generate(pair):
    model, base = pair
    some = [*prompts(4), np.array([7])]
    lengths = [70, 9, 16, 5, 66]  # the long ones outgrow their first bank
    outputs = run(Sampler(base), *(request(p, n) for p, n in zip(some, lengths, strict=True)))
    for prompt, length, output in zip(some, lengths, outputs, strict=True):
        sequence = output.sequences[0]
        assert sequence.stop_reason == "length"
        np.testing.assert_array_equal(sequence.tokens, greedy(model, prompt, length))
        np.testing.assert_allclose(sequence.logprobs, sampled_logprobs(model, prompt, sequence.tokens), atol=1e-4)


def test_logprobs_are_at_the_temperature_and_before_top_k_and_top_p(pair):
    model, base = pair
    prompt = prompts(1)[0]
    for temperature, top_k, top_p in ((0.7, -1, 1.0), (1.3, 5, 1.0), (1.0, -1, 0.4), (2.0, 50, 0.9)):
        sequence = run(Sampler(base), request(prompt, 30, temperature=temperature, top_k=top_k, top_p=top_p, seed=3))[0].sequences[0]
        expected = sampled_logprobs(model, prompt, sequence.tokens, temperature)
        np.testing.assert_allclose(sequence.logprobs, expected, atol=1e-4)


def test_long_prompts_are_prefilled_in_runs(pair):
    model, base = pair
    some = prompts(3, low=100, high=140)
    outputs = run(Sampler(base, prefill_tokens=48, logits_floats=2048 * 20), *(request(p, 10, prompt_logprobs=True) for p in some))
    for prompt, output in zip(some, outputs, strict=True):
        np.testing.assert_array_equal(output.sequences[0].tokens, greedy(model, prompt, 10))
        table = log_softmax(model, prompt)
        np.testing.assert_allclose(output.prompt_logprobs[1:], table[np.arange(len(prompt) - 1), prompt[1:]], atol=1e-4)


def test_adapters_and_the_base_model_in_one_batch_equal_the_merged_models(pair):
    model, base = pair
    snapshots = [
        None,
        random_snapshot(base, 1, 4),
        random_snapshot(base, 2, 8, train_mlp=False),
        random_snapshot(base, 3, 4, train_unembed=False),
    ]
    cases = [(snapshot, prompt) for snapshot in snapshots for prompt in prompts(2, seed=5)]
    outputs = run(Sampler(base), *(request(p, 12, snapshot=s, prompt_logprobs=True) for s, p in cases))
    oracles = {id(s): model if s is None else merged(model, s) for s in snapshots}
    for (snapshot, prompt), output in zip(cases, outputs, strict=True):
        if model.config.tie_word_embeddings and snapshot is not None and "lm_head" in snapshot.matrices:
            continue  # merging would change the embeddings too; the test below covers it
        oracle, sequence = oracles[id(snapshot)], output.sequences[0]
        np.testing.assert_array_equal(sequence.tokens, greedy(oracle, prompt, 12))
        np.testing.assert_allclose(sequence.logprobs, sampled_logprobs(oracle, prompt, sequence.tokens), atol=1e-4)
        scored = log_softmax(oracle, prompt)[np.arange(len(prompt) - 1), prompt[1:]]
        np.testing.assert_allclose(output.prompt_logprobs[1:], scored, atol=1e-4)


def test_an_adapter_alone_and_among_others(pair):
    _, base = pair
    snapshots = [None, *(random_snapshot(base, seed, rank) for seed, rank in ((1, 4), (2, 16), (3, 8)))]
    pairs = zip(snapshots * 2, prompts(8), strict=True)
    cases = [request(p, 16, snapshot=s, seed=i, temperature=1.0, num_samples=2) for i, (s, p) in enumerate(pairs)]
    together = run(Sampler(base), *cases)
    for case, output in zip(cases, together, strict=True):
        alone = run(Sampler(base), case)[0]
        for a, b in zip(output.sequences, alone.sequences, strict=True):
            np.testing.assert_array_equal(a.tokens, b.tokens)
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-5)


def test_the_end_tokens_of_the_model_stop_by_default_and_stay(pair):
    """The end tokens of the model stop a sample by default, and stay in it."""
    model, base = pair
    prompt = prompts(1)[0]
    path = greedy(model, prompt, 40)
    end = int(path[7])
    first = int(np.flatnonzero(path == end)[0])
    base.eos_token_ids, before = (end, 2), base.eos_token_ids
    try:
        sampler = Sampler(base, byte_tokenizer())
        default, never = run(sampler, request(prompt, 40, stop=None), request(prompt, 40, stop=[]))
    finally:
        base.eos_token_ids = before
    assert default.sequences[0].stop_reason == "stop"
    np.testing.assert_array_equal(default.sequences[0].tokens, path[: first + 1])
    assert never.sequences[0].stop_reason == "length" and len(never.sequences[0].tokens) == 40
