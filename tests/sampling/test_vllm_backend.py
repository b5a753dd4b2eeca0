"""The vLLM backend against a stand-in that has vLLM's interface and our own sampler inside."""

from __future__ import annotations

import sys
import types
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from spindle.compute.adapter import AdapterWeights
from spindle.errors import EngineClosed, ServerError, UserError
from spindle.sampling import Sampler, SampleRecords, SampleRequest, make_sampler
from spindle.sampling.vllm_backend import VllmSampler
from spindle.store.checkpoint import load_adapter
from spindle.types import LoraConfig, SamplingParams, TensorData
from tests.sampling.helpers import base_of, byte_tokenizer, drain, prompts, random_snapshot, request
from tests.tiny import tiny_llama


@pytest.fixture(scope="module")
def base():
    return base_of(tiny_llama(vocab_size=320))


class Engine:
    """As much of vllm.LLMEngine as the backend uses."""

    def __init__(self, args) -> None:
        self.sampler, self.running, self.adapters, self.fail = Sampler(args.base, byte_tokenizer()), {}, {}, None
        assert args.enable_lora and args.max_lora_rank == 8 and args.logprobs_mode == "processed_logprobs"

    def add_request(self, key, prompt, params, lora_request=None):
        assert params.ignore_eos and params.include_stop_str_in_output
        snapshot = None
        if lora_request is not None:
            if lora_request.lora_int_id not in self.adapters:
                layout = self.sampler.model.layout(LoraConfig(rank=4))
                loaded = torch.from_numpy(np.asarray(load_adapter(lora_request.lora_path, layout).params))
                self.adapters[lora_request.lora_int_id] = AdapterWeights(layout, loaded)
            snapshot = self.adapters[lora_request.lora_int_id]
        ours = SamplingParams(params.max_tokens, params.seed, params.stop or params.stop_token_ids, params.temperature)
        asked = params.prompt_logprobs is not None
        k = params.prompt_logprobs or 1
        ask = SampleRequest(
            np.array(prompt["prompt_token_ids"]), ours, params.n, snapshot, asked, None, k if asked else 0, params.logprobs or 1
        )
        self.running[key] = (self.sampler.submit(ask), prompt["prompt_token_ids"])

    def abort_request(self, keys):
        for key in keys:
            self.running.pop(key)[0].cancel()

    def remove_lora(self, lora_int_id):
        del self.adapters[lora_int_id]

    def step(self):
        if self.fail:
            raise self.fail
        self.sampler.step()
        done = [key for key, (future, _) in self.running.items() if future.done()]
        return [self._output(key, *self.running.pop(key)) for key in done]

    def _output(self, key, future, prompt):
        def row(ids, logprobs, token, logprob):
            entries = {int(t): SimpleNamespace(logprob=float(p), rank=r + 1) for r, (t, p) in enumerate(zip(ids, logprobs, strict=True))}
            entries.setdefault(int(token), SimpleNamespace(logprob=float(logprob), rank=999))
            return entries

        def rows(ids, logprobs, tokens, own):
            return [row(*four) for four in zip(ids, logprobs, tokens, own, strict=True)]

        answer = future.result()
        outputs = [
            SimpleNamespace(
                index=i, token_ids=s.tokens.tolist(), finish_reason=s.stop_reason,
                logprobs=rows(s.topk_token_ids, s.topk_logprobs, s.tokens, s.logprobs),
            )
            for i, s in enumerate(answer.sequences)
        ]  # fmt: skip
        scores = None
        if answer.prompt_logprobs is not None:
            scores = [None, *rows(answer.topk_prompt_token_ids, answer.topk_prompt_logprobs, prompt, answer.prompt_logprobs)[1:]]
        return SimpleNamespace(
            request_id=key, finished=True, outputs=outputs[::-1], prompt_logprobs=scores, num_cached_tokens=answer.prompt_cache_hit_tokens
        )


@pytest.fixture
def sampler(base, monkeypatch):
    vllm, lora, lora_request = (types.ModuleType(name) for name in ("vllm", "vllm.lora", "vllm.lora.request"))
    vllm.lora, lora.request = lora, lora_request
    vllm.EngineArgs = lambda **fields: SimpleNamespace(base=base, **fields)
    vllm.LLMEngine = SimpleNamespace(from_engine_args=Engine)
    vllm.TokensPrompt = dict
    vllm.SamplingParams = lora_request.LoRARequest = SimpleNamespace
    for module in (vllm, lora, lora_request):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return VllmSampler(base, byte_tokenizer(), "some/model", max_rank=8)


def test_answers_are_those_of_our_own_sampler(base, sampler):
    snapshot = random_snapshot(base, 1)
    one, two = prompts(2, 320, low=20, high=30)
    cases = [
        request(one, 12, num_samples=3, temperature=0.8, seed=4, topk_sample_logprobs=2),
        request(one, 8, snapshot=snapshot, prompt_logprobs=True, prompt_logprobs_last_n=6),
        request(two, 30, stop=["e", "a"], topk_prompt_logprobs=3, prompt_logprobs=True),
        request(two, 0, num_samples=2),
    ]
    outputs = drain(sampler, [sampler.submit(case) for case in cases])
    expected = drain(ours := Sampler(base, byte_tokenizer()), [ours.submit(case) for case in cases])
    for output, other in zip(outputs, expected, strict=True):
        assert [s.stop_reason for s in output.sequences] == [s.stop_reason for s in other.sequences]
        for a, b in zip(output.sequences, other.sequences, strict=True):
            np.testing.assert_array_equal(a.tokens, b.tokens)
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)
            assert (a.topk_token_ids is None) == (b.topk_token_ids is None)
            if a.topk_token_ids is not None:
                np.testing.assert_array_equal(a.topk_token_ids, b.topk_token_ids)
        for name in ("prompt_logprobs", "topk_prompt_token_ids", "topk_prompt_logprobs"):
            a, b = getattr(output, name), getattr(other, name)
            assert (a is None) == (b is None), name
            if a is not None:
                np.testing.assert_allclose(a, b, atol=1e-4)


def test_samples_are_recorded(sampler):
    case = request(prompts(1, 320)[0], 5, sequence_ids=["x"], record_stability_info=True, session="s")
    output = drain(sampler, [sampler.submit(case)])[0]
    np.testing.assert_array_equal(sampler.records.get("x", "s").tokens, output.sequences[0].tokens)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (dict(target_prompt_logprobs=TensorData(np.zeros((2, 1), int))), "target_prompt_logprobs is not supported by the vllm sampler"),
        (dict(prompt_alt_tokens_k=2), "prompt_alt_tokens_k is not supported by the vllm sampler"),
        (dict(temperature=1.0, top_k=5), r"top_k is 5 and top_p is 1.0: the vllm sampler cannot return logprobs from before them"),
        (dict(temperature=1.0, top_p=0.5), r"top_p is 0.5"),
        (dict(num_samples=0), "num_samples is 0"),
    ],
)
def test_what_it_cannot_do_is_refused(sampler, fields, text):
    with pytest.raises(UserError, match=text):
        sampler.submit(request([5, 6, 7], 4, **fields))


def test_failures_cancelling_forgetting_and_closing(base, sampler):
    snapshot = random_snapshot(base, 1)
    cancelled = sampler.submit(request([5, 6], 100, snapshot=snapshot))
    sampler.step()
    cancelled.cancel()
    sampler.step()
    assert not sampler.has_work()
    path = sampler._adapters[id(snapshot)][1].lora_path
    sampler.forget(snapshot)
    assert not sampler._adapters and not __import__("os").path.exists(path)
    failing = sampler.submit(request([5, 6], 100))
    sampler._engine.fail = RuntimeError("device lost")
    sampler.step()
    with pytest.raises(ServerError, match="sampling failed in vllm: RuntimeError: device lost"):
        failing.result(0)
    queued = sampler.submit(request([5, 6], 100))
    sampler.close()
    with pytest.raises(EngineClosed):
        queued.result(0)
    with pytest.raises(EngineClosed):
        sampler.submit(request([5], 1))


def test_without_vllm_the_option_says_so(base):
    with pytest.raises(UserError, match=r"needs the package vllm, .* install it with `pip install vllm`"):
        make_sampler("vllm", base, None, SampleRecords())


def test_backends_by_name(base, sampler):
    records = SampleRecords()
    assert make_sampler("spindle", base, None, records, max_running=3).records is records
    assert make_sampler("vllm", base, None, records, max_rank=8).records is records
    with pytest.raises(UserError, match="sampler is 'sglang'; allowed: spindle, vllm"):
        make_sampler("sglang", base, None, records)
