"""A bfloat16 base model: the same road, coarser numbers."""

from __future__ import annotations

import numpy as np
import torch

from spindle.compute.adapter import Adapter
from spindle.compute.model import BaseModel
from spindle.sampling import Sampler
from spindle.types import LoraConfig
from tests.sampling.helpers import log_softmax, prompts, request, run
from tests.tiny import tiny_llama


def test_base_and_adapter_in_bfloat16():
    reference = tiny_llama()
    base = BaseModel.load(tiny_llama(), dtype=torch.bfloat16)
    adapter = Adapter(base.layout(LoraConfig(rank=4))).init(0)  # B is zero: the same function as the base
    prompt = prompts(1)[0]
    for snapshot in (None, adapter.snapshot(base.dtype)):
        output = run(Sampler(base), request(prompt, 8, snapshot=snapshot, temperature=1.0, seed=1, prompt_logprobs=True))[0]
        sequence = output.sequences[0]
        assert sequence.logprobs.dtype == np.float32
        table = log_softmax(reference, np.concatenate([prompt, sequence.tokens]))
        expected = table[np.arange(len(prompt) - 1, len(prompt) + 7), sequence.tokens]
        assert np.abs(sequence.logprobs - expected).mean() < 0.2
        assert np.abs(output.prompt_logprobs[1:] - table[np.arange(len(prompt) - 1), prompt[1:]]).mean() < 0.2
