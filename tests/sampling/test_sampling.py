"""What a request asks is what it gets: seeds, temperature, top-k, top-p, stops, several samples, cancelling."""

from __future__ import annotations

import numpy as np
import pytest

from spindle.errors import EngineClosed, ServerError
from spindle.sampling import Sampler
from tests.sampling.helpers import base_of, byte_tokenizer, drain, greedy, log_softmax, prompts, random_snapshot, request, run
from tests.tiny import tiny_llama


@pytest.fixture(scope="module")
def model():
    return tiny_llama(vocab_size=320)


@pytest.fixture(scope="module")
def base(model):
    return base_of(model)


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer(320)


def tokens_of(output):
    return [s.tokens.tolist() for s in output.sequences]


def test_temperature_0_is_the_argmax_path_for_all_samples(model, base):
    prompt = prompts(1, 320)[0]
    output = run(Sampler(base), request(prompt, 20, num_samples=8, temperature=0.0, seed=5))[0]
    assert tokens_of(output) == [greedy(model, prompt, 20).tolist()] * 8


def test_a_seed_reproduces_the_request_whatever_runs_beside_it(base):
    prompt = prompts(1, 320)[0]
    case = request(prompt, 24, num_samples=4, temperature=1.0, seed=11, top_k=40, top_p=0.95)
    alone = tokens_of(run(Sampler(base), case)[0])
    assert len({tuple(t) for t in alone}) == 4  # samples of one request differ
    noisy = [request(p, 30, num_samples=3, temperature=1.1, seed=i) for i, p in enumerate(prompts(6, 320, seed=9))]
    sampler = Sampler(base, prefill_tokens=24)
    neighbours = [sampler.submit(r) for r in noisy[:4]]
    for _ in range(5):
        sampler.step()
    mine = sampler.submit(case)
    neighbours += [sampler.submit(r) for r in noisy[4:]]
    drain(sampler, neighbours)
    assert tokens_of(mine.result(0)) == alone
    assert tokens_of(run(Sampler(base), request(prompt, 24, num_samples=4, temperature=1.0, seed=12, top_k=40, top_p=0.95))[0]) != alone
    negative = request(prompt, 24, temperature=1.0, seed=-1)
    assert tokens_of(run(Sampler(base), negative)[0]) == tokens_of(run(Sampler(base), negative)[0])


def test_without_a_seed_requests_differ(base):
    prompt = prompts(1, 320)[0]
    outputs = run(Sampler(base), *(request(prompt, 16, temperature=1.0) for _ in range(4)))
    assert len({tuple(tokens_of(o)[0]) for o in outputs}) == 4


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(1.0, -1, 1.0), (0.5, -1, 1.0), (1.0, 4, 1.0), (1.5, -1, 0.6), (1.0, 12, 0.7)])
def test_first_tokens_follow_the_distribution(model, base, temperature, top_k, top_p):
    """4,096 draws against the exact probabilities, by total variation and by support."""
    prompt = prompts(1, 320, seed=4)[0]
    settings = dict(temperature=temperature, top_k=top_k, top_p=top_p, seed=1)
    output = run(Sampler(base, max_running=64), request(prompt, 1, num_samples=4096, **settings))[0]
    drawn = np.bincount([s.tokens[0] for s in output.sequences], minlength=320) / 4096
    probs = np.exp(log_softmax(model, prompt, temperature)[-1].astype(np.float64))
    order = np.argsort(-probs)
    kept = np.zeros(320)
    kept[order[: top_k if top_k > 0 else 320]] = 1
    expected = probs * kept / (probs * kept).sum()
    before = np.cumsum(expected[order]) - expected[order]
    expected[order[before >= top_p]] = 0
    expected /= expected.sum()
    assert drawn[expected == 0].sum() == 0
    assert 0.5 * np.abs(drawn - expected).sum() < 0.5 * np.sqrt(np.count_nonzero(expected) / 4096) + 0.02


def test_top_k_1_is_greedy(model, base):
    prompt = prompts(1, 320)[0]
    assert tokens_of(run(Sampler(base), request(prompt, 12, temperature=1.0, top_k=1))[0]) == [greedy(model, prompt, 12).tolist()]
    assert tokens_of(run(Sampler(base), request(prompt, 12, temperature=1.0, top_p=1e-9))[0]) == [greedy(model, prompt, 12).tolist()]


def test_stop_token_ids(model, base):
    prompt = prompts(1, 320)[0]
    path = greedy(model, prompt, 30)
    for at in (0, 5, 20):
        first = int(np.flatnonzero(path == path[at])[0])
        output = run(Sampler(base), request(prompt, 30, stop=[319 - int(path[at]) if path[at] > 200 else int(path[at]), int(path[at])]))[0]
        assert output.sequences[0].tokens.tolist() == path[: first + 1].tolist()
        assert output.sequences[0].stop_reason == "stop"
        assert len(output.sequences[0].logprobs) == first + 1


def test_the_last_token_may_be_a_stop_token(model, base):
    prompt = prompts(1, 320)[0]
    path = greedy(model, prompt, 6)
    first = int(np.flatnonzero(path == path[-1])[0])
    output = run(Sampler(base), request(prompt, first + 1, stop=[int(path[-1])]))[0]
    assert output.sequences[0].stop_reason == "stop"


def test_stop_strings_match_across_token_borders(model, base, tokenizer):
    """Every substring of the decoded path stops at the first token whose text completes it, and that token stays."""
    tried = 0
    for prompt in prompts(4, 320, seed=2):
        path = greedy(model, prompt, 48)
        texts = [tokenizer.decode(path[: i + 1].tolist(), skip_special_tokens=False) for i in range(48)]
        whole = texts[-1].rstrip("\ufffd")
        for start in range(0, len(whole) - 4, 3):
            stop = whole[start : start + 4]
            if "\ufffd" in stop:
                continue
            expected = next(i for i, text in enumerate(texts) if stop in text)
            sequence = run(Sampler(base, tokenizer), request(prompt, 48, stop=["never in it, surely", stop]))[0].sequences[0]
            assert (sequence.stop_reason, sequence.tokens.tolist()) == ("stop", path[: expected + 1].tolist()), stop
            tried += 1
    assert tried >= 10


def test_stop_string_over_a_character_split_into_bytes(tokenizer):
    from spindle.sampling.stops import StopMatcher

    ids = tokenizer("ab 中é!").input_ids
    assert len(ids) > 6
    matcher = StopMatcher(tokenizer, ("中é",), np.array(ids[:2]))
    hits = [matcher.push(token) for token in ids[2:]]
    assert hits.index(True) == next(i for i in range(len(ids)) if "中é" in tokenizer.decode(ids[2 : i + 3]))


def test_stop_string_does_not_match_the_prompt(tokenizer):
    from spindle.sampling.stops import StopMatcher

    prompt, more = tokenizer("the thread").input_ids, tokenizer(" turns").input_ids
    matcher = StopMatcher(tokenizer, ("thread", "d t"), np.array(prompt))
    assert not any(matcher.push(token) for token in more)


def test_top_k_rows_of_samples(model, base):
    prompt = prompts(1, 320)[0]
    with_rows, without, wider = run(
        Sampler(base),
        request(prompt, 9, temperature=0.8, seed=2, topk_sample_logprobs=3),
        request(prompt, 9, temperature=0.8, seed=2),
        request(prompt, 9, topk_sample_logprobs=7),
    )
    sequence = with_rows.sequences[0]
    assert without.sequences[0].topk_token_ids is None and wider.sequences[0].topk_logprobs.shape == (9, 7)
    table = log_softmax(model, np.concatenate([prompt, sequence.tokens]), 0.8)[len(prompt) - 1 : -1]
    np.testing.assert_array_equal(sequence.topk_token_ids, np.argsort(-table, axis=-1)[:, :3])
    np.testing.assert_allclose(sequence.topk_logprobs, -np.sort(-table, axis=-1)[:, :3], atol=1e-4)
    np.testing.assert_array_equal(sequence.tokens, without.sequences[0].tokens)
    np.testing.assert_array_equal(wider.sequences[0].topk_token_ids[:, 0], wider.sequences[0].tokens)


def test_max_tokens_none_fills_the_context_and_0_samples_nothing(base):
    prompt = np.arange(2, 312)
    full, none = run(Sampler(base), request(prompt, None), request(prompt, 0, num_samples=2, prompt_logprobs=True, topk_sample_logprobs=2))
    assert len(full.sequences[0].tokens) == 512 - 310
    assert [s.tokens.size for s in none.sequences] == [0, 0] and none.sequences[0].topk_logprobs.shape == (0, 2)
    assert np.isfinite(none.prompt_logprobs[1:]).all()


def test_more_samples_than_run_at_once_and_a_small_kv_budget_change_nothing(base):
    """Preempted samples go on where they were: noise depends on seed and position, not on the step."""
    cases = [request(p, 70, num_samples=5, temperature=1.0, seed=i) for i, p in enumerate(prompts(5, 320))]
    roomy = Sampler(base)
    expected = [tokens_of(o) for o in run(roomy, *cases)]
    tight = Sampler(base, max_running=7, kv_bytes=250_000, prefix_bytes=0)
    assert [tokens_of(o) for o in run(tight, *cases)] == expected
    assert roomy.stats()["preempted"] == 0 and tight.stats()["preempted"] > 0
    many = run(Sampler(base, max_running=32), request(cases[0].prompt, 5, num_samples=150, temperature=1.0, seed=0))[0]
    assert [t[:5] for t in tokens_of(many)[:5]] == [t[:5] for t in expected[0]]
    assert len(many.sequences) == 150


def test_a_snapshot_is_what_it_was(base):
    from spindle.compute.adapter import Adapter
    from spindle.types import LoraConfig

    adapter = Adapter(base.layout(LoraConfig(rank=4))).init(0)
    adapter.params.add_(0.05)
    snapshot = adapter.snapshot()
    case = request(prompts(1, 320)[0], 20, snapshot=snapshot)
    before = tokens_of(run(Sampler(base), case)[0])
    sampler = Sampler(base)
    future = sampler.submit(case)
    for _ in range(8):
        sampler.step()
    adapter.params.mul_(-3.0)  # training goes on beside it
    assert tokens_of(drain(sampler, [future])[0]) == before
    later = request(case.prompt, 20, snapshot=adapter.snapshot())
    assert tokens_of(run(sampler, later)[0]) != before


def test_cancelled_requests_stop(base):
    sampler = Sampler(base)
    running = sampler.submit(request(prompts(1, 320)[0], 400, num_samples=3))
    kept = sampler.submit(request(prompts(2, 320)[1], 12))
    for _ in range(3):
        sampler.step()
    waiting = sampler.submit(request(prompts(3, 320)[2], 400))
    assert running.cancel() and waiting.cancel()
    assert len(drain(sampler, [kept])[0].sequences[0].tokens) == 12
    assert sampler.stats()["steps"] <= 14
    assert sampler.stats()["kv_bytes"] == 0 and sampler.stats()["running"] == 0


def test_a_failing_pass_fails_those_in_it_and_no_others(base, monkeypatch):
    sampler = Sampler(base, max_running=2)
    held = sampler.submit(request(prompts(1, 320)[0], 50, num_samples=2))
    waiting = sampler.submit(request(prompts(1, 320)[0], 5))
    sampler.step()
    with monkeypatch.context() as patch:
        patch.setattr(base, "hidden", lambda *a, **k: (_ for _ in ()).throw(RuntimeError("no memory left")))
        sampler.step()
    with pytest.raises(ServerError, match="sampling failed: RuntimeError: no memory left"):
        held.result(0)
    assert len(drain(sampler, [waiting])[0].sequences[0].tokens) == 5


def test_close_fails_what_is_queued_and_running(base):
    sampler = Sampler(base)
    running = sampler.submit(request(prompts(1, 320)[0], 50))
    sampler.step()
    queued = sampler.submit(request(prompts(1, 320)[0], 50))
    sampler.close()
    for future in (running, queued):
        with pytest.raises(EngineClosed, match="closed before the sample was finished"):
            future.result(0)
    with pytest.raises(EngineClosed):
        sampler.submit(request([5], 1))
    assert not sampler.has_work()


def test_one_pass_per_token_whatever_the_number_of_adapters(base):
    """Many adapters are decoded in the same passes, prompts beside running samples."""
    sampler = Sampler(base)
    some = [request(p, 10, snapshot=random_snapshot(base, i)) for i, p in enumerate(prompts(6, 320))]
    run(sampler, *some)
    assert sampler.stats()["steps"] == 10


def test_sessions_take_turns(base):
    """A client with many requests holds up its own ones only."""
    sampler = Sampler(base, max_running=2, prefix_bytes=0)
    done = []
    some = prompts(12, 320)
    for i, prompt in enumerate(some[:10]):
        sampler.submit(request(prompt, 6, session="many")).add_done_callback(lambda _, i=i: done.append(("many", i)))
    for i, prompt in enumerate(some[10:]):
        sampler.submit(request(prompt, 6, session="few")).add_done_callback(lambda _, i=i: done.append(("few", i)))
    drain(sampler, [])
    assert done.index(("few", 1)) <= 4
    assert all(abs(i - at) <= 1 for at, i in enumerate(i for who, i in done if who == "many"))
