"""Logprobs of samples at any temperature are log-softmax(logits / temperature), as transformers computes them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytestmark = [pytest.mark.cookbook, pytest.mark.timeout(900)]


def test_sampled_logprobs_at_any_temperature(cookbook, model):
    answers = cookbook.script("temperature.py")
    assert [answer["temperature"] for answer in answers] == [0.0, 0.3, 0.7, 1.0, 1.7]
    for answer in answers:
        tokens = torch.tensor([answer["prompt"] + answer["tokens"]])
        assert len(answer["tokens"]) == 24
        with torch.no_grad():
            logits = model(tokens).logits[0, len(answer["prompt"]) - 1 : -1].double()
        rows = torch.arange(24), torch.tensor(answer["tokens"])
        expected = torch.log_softmax(logits / (answer["temperature"] or 1.0), -1)[rows]
        # both sides hold logits in float32; a low temperature magnifies their last bits
        np.testing.assert_allclose(answer["logprobs"], expected, atol=1e-5 / min(answer["temperature"] or 1.0, 1.0))
        np.testing.assert_allclose(answer["scored"], torch.log_softmax(logits, -1)[rows], atol=1e-5)
        if answer["temperature"] == 0:
            assert answer["tokens"] == logits.argmax(-1).tolist()
