"""An exported adapter is PEFT's: loaded back by peft it computes what the engine computes."""

from __future__ import annotations

import numpy as np
import peft
import pytest
import torch

from spindle import AdamParams, Datum, Engine
from spindle.compute.model import BaseModel
from tests.tiny import VOCAB, tiny_llama, tiny_qwen3


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen3])
@pytest.mark.parametrize("tied", [False, True])
def test_peft_computes_the_same_logprobs(tmp_path, make, tied):
    tokens = np.random.default_rng(0).integers(2, VOCAB, 20)
    data = [Datum(tokens[:-1], {"target_tokens": tokens[1:], "weights": np.ones(19, np.float32)})]
    with Engine(BaseModel.load(make(tied=tied))) as engine:
        adapter = engine.create_adapter(rank=4, seed=1)
        for _ in range(3):
            adapter.forward_backward(data)
            adapter.optim_step(AdamParams(learning_rate=1e-2))
        ours = adapter.forward(data).result().loss_fn_outputs[0]["logprobs"]
        path = adapter.save(tmp_path / "adapter").result()
    model = peft.PeftModel.from_pretrained(make(tied=tied), path).eval()
    with torch.no_grad():
        logits = model(torch.tensor(tokens[:-1])[None]).logits[0]
    theirs = torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    assert np.abs(theirs.numpy() - ours).max() <= 1e-5
