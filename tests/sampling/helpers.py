"""Models, tokenizers and oracles shared by the sampling tests."""

from __future__ import annotations

import copy
from concurrent.futures import Future

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from spindle.compute.adapter import Adapter, AdapterWeights
from spindle.compute.model import BaseModel
from spindle.sampling import Sampler, SampleRequest
from spindle.types import LoraConfig, SampleOutput, SamplingParams


def base_of(model: PreTrainedModel) -> BaseModel:
    return BaseModel.load(copy.deepcopy(model))


def request(prompt, max_tokens=8, num_samples=1, snapshot=None, stop=(), temperature=0.0, seed=None, top_k=-1, top_p=1.0, **fields):
    """Greedy and stopped by nothing but max_tokens unless it says otherwise."""
    stop = list(stop) if isinstance(stop, tuple) else stop
    params = SamplingParams(max_tokens=max_tokens, seed=seed, stop=stop, temperature=temperature, top_k=top_k, top_p=top_p)
    return SampleRequest(np.asarray(prompt), params, num_samples, snapshot, **fields)


def run(sampler: Sampler, *requests: SampleRequest) -> list[SampleOutput]:
    return drain(sampler, [sampler.submit(r) for r in requests])


def drain(sampler: Sampler, futures: list[Future]) -> list[SampleOutput]:
    for _ in range(10_000):
        if not sampler.has_work():
            break
        sampler.step()
    assert not sampler.has_work()
    return [future.result(timeout=0) for future in futures]


def prompts(count: int, vocab: int = 2048, seed: int = 0, low: int = 3, high: int = 40) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(2, vocab, n) for n in rng.integers(low, high, count)]


def greedy(model: PreTrainedModel, prompt: np.ndarray, tokens: int) -> np.ndarray:
    """transformers' own greedy path, nothing stops it."""
    ids = torch.from_numpy(prompt)[None]
    out = model.generate(ids, max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
    return out[0, len(prompt) :].numpy()


@torch.no_grad()
def log_softmax(model: PreTrainedModel, tokens: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """transformers' next-token log-softmax after every token: [n, V]."""
    return torch.log_softmax(model(torch.from_numpy(np.asarray(tokens, np.int64))[None]).logits[0] / temperature, -1).numpy()


def random_snapshot(base: BaseModel, seed: int, rank: int = 4, size: float = 0.05, **flags: bool) -> AdapterWeights:
    """A frozen adapter whose B matrices are not zero."""
    adapter = Adapter(base.layout(LoraConfig(rank=rank, **flags))).init(seed)
    adapter.params.add_(torch.randn(adapter.params.shape, generator=torch.Generator().manual_seed(seed)) * size)
    return adapter.snapshot()


def merged(model: PreTrainedModel, weights: AdapterWeights) -> PreTrainedModel:
    """The same as a plain transformers model, the low-rank updates added to its matrices."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for path, (a, b) in weights.matrices.items():
            model.get_submodule(path).weight.add_(b @ a, alpha=weights.scale)
    return model


def byte_tokenizer(vocab: int = 320) -> PreTrainedTokenizerFast:
    """Byte-level BPE: every byte is a token, some pairs are merged, so that characters and words cross token borders."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False)
    tokenizer.train_from_iterator(
        ["the loom turns the thread, and the thread turns the spindle: Übergröße, größer, größte — naïve café"] * 4, trainer
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
