"""What is asked of the prompt: against transformers' full table of logprobs."""

from __future__ import annotations

import numpy as np
import pytest

from spindle.sampling import Sampler
from spindle.types import TensorData
from tests.sampling.helpers import base_of, log_softmax, prompts, request, run
from tests.tiny import tiny_qwen3


@pytest.fixture(scope="module")
def model():
    return tiny_qwen3()


@pytest.fixture(scope="module")
def sampler(model):
    return Sampler(base_of(model), prefill_tokens=16, logits_floats=2048 * 7)


@pytest.fixture(scope="module")
def prompt():
    return prompts(1, low=30, high=31)[0]


@pytest.fixture(scope="module")
def table(model, prompt):
    """[29, V]: row r scores prompt token r + 1."""
    return log_softmax(model, prompt)[:-1]


def test_prompt_logprobs(sampler, prompt, table):
    # The temperature of the request does not touch what is said of the prompt.
    output = run(sampler, request(prompt, 1, prompt_logprobs=True, temperature=0.3))[0]
    assert np.isnan(output.prompt_logprobs[0]) and output.prompt_logprobs.dtype == np.float32
    np.testing.assert_allclose(output.prompt_logprobs[1:], table[np.arange(29), prompt[1:]], atol=1e-4)
    assert output.topk_prompt_logprobs is None and output.target_prompt_logprobs is None and output.prompt_alt_token_ids is None


def test_top_k_rows(sampler, prompt, table):
    output = run(sampler, request(prompt, 1, topk_prompt_logprobs=4, temperature=2.0))[0]
    assert output.prompt_logprobs is None
    assert output.topk_prompt_token_ids[0].tolist() == [0] * 4 and output.topk_prompt_logprobs[0].tolist() == [-99999.0] * 4
    np.testing.assert_array_equal(output.topk_prompt_token_ids[1:], np.argsort(-table, axis=-1)[:, :4])
    np.testing.assert_allclose(output.topk_prompt_logprobs[1:], -np.sort(-table, axis=-1)[:, :4], atol=1e-4)


def test_last_n(sampler, prompt, table):
    output = run(sampler, request(prompt, 1, prompt_logprobs=True, prompt_logprobs_last_n=5, topk_prompt_logprobs=2))[0]
    assert np.isnan(output.prompt_logprobs[:25]).all()
    np.testing.assert_allclose(output.prompt_logprobs[25:], table[np.arange(24, 29), prompt[25:]], atol=1e-4)
    assert (output.topk_prompt_logprobs[:25] == -99999.0).all() and (output.topk_prompt_token_ids[:25] == 0).all()
    np.testing.assert_array_equal(output.topk_prompt_token_ids[25:], np.argsort(-table, axis=-1)[24:, :2])


def test_dense_targets(sampler, prompt, table):
    rng = np.random.default_rng(1)
    ids = rng.integers(-1, 2048, (29, 3))
    ids[rng.random((29, 3)) < 0.5] = -1
    output = run(sampler, request(prompt, 1, target_prompt_logprobs=TensorData(ids)))[0]
    answer = output.target_prompt_logprobs
    expected = np.where(ids < 0, 0.0, np.take_along_axis(table, np.maximum(ids, 0), 1))
    assert answer.data.shape == (29, 3) and answer.data.dtype == np.float32 and answer.crow_indices is None
    np.testing.assert_allclose(answer.data, expected, atol=1e-4)


def test_csr_targets_keep_their_layout(sampler, prompt, table):
    crow = np.zeros(30, np.int64)
    crow[11:] = 2
    crow[29:] = 4
    tensor = TensorData(np.array([5, 9, -1, 7]), (29, 3), crow, np.array([0, 2, 1, 2]))
    output = run(sampler, request(prompt, 1, target_prompt_logprobs=tensor))[0].target_prompt_logprobs
    assert output.shape == (29, 3)
    np.testing.assert_array_equal(output.crow_indices, crow)
    np.testing.assert_array_equal(output.col_indices, [0, 2, 1, 2])
    np.testing.assert_allclose(output.data, [table[10, 5], table[10, 9], 0.0, table[28, 7]], atol=1e-4)


def test_targets_that_ask_nothing(sampler, prompt):
    output = run(sampler, request(prompt, 1, target_prompt_logprobs=TensorData(np.full((29, 2), -1))))[0]
    np.testing.assert_array_equal(output.target_prompt_logprobs.data, np.zeros((29, 2), np.float32))


def test_alternatives_are_drawn_at_the_temperature(sampler, model, prompt, table):
    case = request(prompt, 1, prompt_alt_tokens_k=400, temperature=0.5, seed=3)
    output, again, other = run(sampler, case, case, request(prompt, 1, prompt_alt_tokens_k=400, temperature=0.5, seed=4))
    ids, logprobs = output.prompt_alt_token_ids, output.prompt_alt_logprobs
    assert ids.shape == (29, 400) and ids.dtype == np.int64 and logprobs.dtype == np.float32
    assert (ids == again.prompt_alt_token_ids).mean() > 0.999  # a draw on a border may fall to either side with the batch's rounding
    assert (ids != other.prompt_alt_token_ids).any()
    np.testing.assert_allclose(logprobs, np.take_along_axis(table, ids, 1), atol=1e-4)
    probs = np.exp(log_softmax(model, prompt, 0.5)[:-1].astype(np.float64))
    best = probs.argmax(-1)
    expected = probs[np.arange(29), best]
    share = (ids == best[:, None]).mean(1)
    assert (np.abs(share - expected) < 5 * np.sqrt(expected * (1 - expected) / 400) + 0.01).all()


def test_greedy_alternatives(sampler, prompt, table):
    output = run(sampler, request(prompt, 1, prompt_alt_tokens_k=2, temperature=0.0))[0]
    np.testing.assert_array_equal(output.prompt_alt_token_ids, np.repeat(table.argmax(-1)[:, None], 2, 1))


def test_a_prompt_of_one_token(sampler):
    fields = dict(prompt_logprobs=True, topk_prompt_logprobs=2, prompt_alt_tokens_k=3)
    output = run(sampler, request([9], 2, **fields))[0]
    assert output.prompt_logprobs.shape == (1,) and np.isnan(output.prompt_logprobs[0])
    assert output.topk_prompt_logprobs.tolist() == [[-99999.0, -99999.0]] and output.prompt_alt_token_ids.shape == (0, 3)


def test_everything_at_once_equals_each_alone(sampler, prompt):
    ids = TensorData(np.tile(np.arange(3), (29, 1)))
    fields = dict(prompt_logprobs=True, topk_prompt_logprobs=3, target_prompt_logprobs=ids, prompt_alt_tokens_k=2, seed=1)
    together = run(sampler, request(prompt, 3, **fields))[0]
    topk = run(sampler, request(prompt, 3, topk_prompt_logprobs=3))[0]
    targets = run(sampler, request(prompt, 3, target_prompt_logprobs=ids))[0]
    np.testing.assert_array_equal(together.topk_prompt_token_ids, topk.topk_prompt_token_ids)
    np.testing.assert_allclose(together.target_prompt_logprobs.data, targets.target_prompt_logprobs.data, atol=1e-5)
    np.testing.assert_array_equal(together.sequences[0].tokens, topk.sequences[0].tokens)
