"""How much does batching gain over one sample at a time, how much of the prompts is never prefilled again, what does publishing cost?

The model is a random Qwen3 of 8 layers x 512 and 32,000 tokens, float32. Every rival's tokens are compared.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests.tiny, wherever pytest was started

import numpy as np
import pytest
import servers
import tinker
import torch
from engine_cases import qwen3_config
from transformers import PreTrainedModel

import spindle
from spindle.compute.model import BaseModel
from spindle.sampling import Sampler, SampleRequest
from spindle.types import SamplingParams
from tests.tiny import build

SAMPLES = 64
TOKENS = 64
SERIAL = 4  # samples timed one at a time; their throughput is the rival


def model() -> PreTrainedModel:
    """The same weights each time."""
    return build(qwen3_config(bos_token_id=0, eos_token_id=1, pad_token_id=None))


@pytest.fixture(scope="module")
def base() -> BaseModel:
    return BaseModel.load(model())


def ask(prompt: np.ndarray, tokens: int) -> SampleRequest:
    return SampleRequest(prompt, SamplingParams(max_tokens=tokens, temperature=0.0, stop=[]))


def run(sampler: Sampler, requests: list[SampleRequest]) -> tuple[float, list]:
    """-> seconds, outputs."""
    began = time.perf_counter()
    futures = [sampler.submit(request) for request in requests]
    while sampler.has_work():
        sampler.step()
    return time.perf_counter() - began, [future.result() for future in futures]


def test_batched_over_serial(base, figures):
    """64 concurrent samples of 64 tokens against transformers.generate, one at a time; bar 4."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, 32_000, n) for n in rng.integers(16, 48, SAMPLES)]
    rival = model()
    rival.generation_config.update(do_sample=False, eos_token_id=None, pad_token_id=0)
    rival.generate(torch.from_numpy(prompts[0])[None], max_new_tokens=4)
    run(Sampler(base), [ask(p, 4) for p in prompts[:4]])

    began = time.perf_counter()
    serial = [rival.generate(torch.from_numpy(p)[None], max_new_tokens=TOKENS)[0, len(p) :].numpy() for p in prompts[:SERIAL]]
    serial_s = (time.perf_counter() - began) / SERIAL
    batched_s, outputs = run(Sampler(base), [ask(p, TOKENS) for p in prompts])
    for output, expected in zip(outputs, serial, strict=False):
        np.testing.assert_array_equal(output.sequences[0].tokens, expected)

    figures["serial_tokens_per_s"] = TOKENS / serial_s
    figures["batched_tokens_per_s"] = SAMPLES * TOKENS / batched_s
    figures["batched_over_serial_64"] = SAMPLES * serial_s / batched_s
    assert figures["batched_over_serial_64"] >= 4


def test_prefix_hits(base, figures):
    """Eight conversations under one system prompt, four requests each turn, two turns: the share of prompt tokens that came from the
    cache, of those that could (all but each request's last token and what comes first)."""
    rng = np.random.default_rng(1)
    system = rng.integers(2, 32_000, 96)
    prompts = [np.concatenate([system, rng.integers(2, 32_000, 32)]) for _ in range(8)]
    sampler, cold = Sampler(base), Sampler(base, prefix_bytes=0)
    _, outputs = run(sampler, [ask(p, 24) for p in prompts for _ in range(4)])
    turns = [np.concatenate([p, o.sequences[0].tokens, rng.integers(2, 32_000, 16)]) for p, o in zip(prompts, outputs[::4], strict=True)]
    warm_s, warm = run(sampler, [ask(p, 24) for p in turns for _ in range(4)])
    cold_s, without = run(cold, [ask(p, 24) for p in turns for _ in range(4)])
    for a, b in zip(warm, without, strict=True):
        np.testing.assert_array_equal(a.sequences[0].tokens, b.sequences[0].tokens)
    stats = sampler.stats()
    figures["prefix_hit_share"] = stats["prefix_hit_tokens"] / stats["prompt_tokens"]
    figures["prefix_cold_over_warm"] = cold_s / warm_s
    assert figures["prefix_hit_share"] >= 0.8


def test_publish_over_memcpy(figures):
    """From the call until the snapshot can serve, for an adapter of about 64 MB on an idle engine, against copying its bytes; bar 3."""
    with spindle.Engine(BaseModel.load(model()), devices=["cpu"]) as engine:
        adapter = engine.create_adapter(rank=144, seed=0)
        snapshot = adapter.publish().result(60)
        nbytes = snapshot.params.nbytes
        copied, published = [], []
        for _ in range(15):
            began = time.perf_counter()
            twin = snapshot.params.clone()
            copied.append(time.perf_counter() - began)
            del twin
            began = time.perf_counter()
            snapshot = adapter.publish().result(60)
            published.append(time.perf_counter() - began)
        assert torch.equal(snapshot.params, adapter.publish().result(60).params)
    figures["publish_mb"] = nbytes / 1e6
    figures["publish_over_memcpy"] = statistics.median(published) / statistics.median(copied)
    assert figures["publish_over_memcpy"] <= 3


def test_publish_over_http(figures, tmp_path):
    """The same through the SDK over loopback, on a tiny model: until the sampling client is there."""
    with servers.started("spindle", str(tmp_path / "store")) as url:
        service = tinker.ServiceClient(base_url=url, api_key=servers.KEY)
        training = service.create_lora_training_client(base_model=servers.NAME, rank=8, seed=0).result()
        training.save_weights_and_get_sampling_client().result(60)
        taken = []
        for _ in range(15):
            began = time.perf_counter()
            sampling = training.save_weights_and_get_sampling_client().result(60)
            taken.append(time.perf_counter() - began)
        prompt = tinker.ModelInput.from_ints([5, 6, 7])
        answer = sampling.sample(prompt, 1, tinker.SamplingParams(max_tokens=4, temperature=0.0)).result()
        assert len(answer.sequences[0].tokens) == 4
        service.close("success").result(30)
    figures["publish_http_ms_p50"] = 1000 * statistics.median(taken)
