"""Checkpoints leave the server: the cookbook's download (an encrypted export), its PEFT adapter, its merged model, its copy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

pytestmark = [pytest.mark.cookbook, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def exported(cookbook):
    pytest.importorskip("pyrage")
    return cookbook.script("export.py")


def scores(model, tokens: list[int]) -> np.ndarray:
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([tokens])).logits[0, :-1].double(), -1)
    return logprobs[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])].numpy()


def test_adapter_and_merged_model_score_as_the_server_does(cookbook, exported):
    base = AutoModelForCausalLM.from_pretrained(cookbook.root / "model").eval()
    before = scores(base, exported["tokens"])
    merged = AutoModelForCausalLM.from_pretrained(cookbook.root / "exported" / "merged").eval()
    adapted = PeftModel.from_pretrained(base, cookbook.root / "exported" / "peft").eval()
    assert np.abs(before - exported["scored"]).max() > 0.05
    for model in (merged, adapted):
        np.testing.assert_allclose(scores(model, exported["tokens"]), exported["scored"], atol=1e-4)


def test_copy_checkpoint(cookbook, exported):
    copy = cookbook.process("-m", "tinker_cookbook.scripts.copy_checkpoint", "--source-path", exported["path"], "--output-name", "copied")
    assert copy.startswith("sampler_path:") and copy.rstrip().endswith("/sampler_weights/copied")
