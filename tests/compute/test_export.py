"""An exported adapter of every model family loads in peft with equal logits."""

from __future__ import annotations

import copy

import peft
import pytest
import torch

from spindle.compute.attention import Packing
from spindle.compute.model import BaseModel
from spindle.store.checkpoint import save_adapter
from spindle.types import LoraConfig
from tests.compute.helpers import random_adapter
from tests.tiny import tiny_gemma3, tiny_llama, tiny_mistral, tiny_phi3, tiny_qwen3, tiny_qwen3_moe


@pytest.mark.parametrize(
    "build", [tiny_llama, lambda: tiny_qwen3(tied=True), tiny_mistral, tiny_phi3, tiny_gemma3, tiny_qwen3_moe], ids=lambda b: b.__name__
)
def test_an_export_loads_in_peft(tmp_path, build):
    model = build()
    base = BaseModel.load(copy.deepcopy(model))
    adapter = random_adapter(base, LoraConfig(rank=4))
    save_adapter(tmp_path / "adapter", adapter.layout, adapter.params, "base", optimizer=None, metadata={})
    theirs = peft.PeftModel.from_pretrained(model, tmp_path / "adapter")
    tokens = torch.arange(3, 43)
    groups = [(0, 40, adapter.weights())]
    with torch.no_grad():
        got = base.logits(base.hidden(tokens, torch.arange(40), Packing([40]), groups), groups)
        want = theirs(input_ids=tokens[None], use_cache=False).logits[0]
        bare = base.logits(base.hidden(tokens, torch.arange(40), Packing([40])))
    assert (got - want).abs().max() <= 1e-4 * want.abs().max()
    assert (got - bare).abs().max() > 0.1
