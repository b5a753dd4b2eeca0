"""bfloat16 base weights, float32 adapters: how far from float32, as a table (printed with -s)."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from spindle.compute.model import BaseModel
from spindle.compute.worker import DeviceWorker
from spindle.types import AdamParams, LoraConfig
from tests.compute.helpers import Request, pack, random_adapter, random_item
from tests.tiny import tiny_gemma3, tiny_llama, tiny_qwen3

ROWS = [("model", "mean |dp|", "max |dp|", "gradient, relative", "loss, relative")]


@pytest.mark.parametrize("build", [tiny_llama, tiny_qwen3, tiny_gemma3])
def test_deviation_from_float32(build):
    model = build().to(torch.bfloat16).float()  # weights that bfloat16 holds exactly: what differs is arithmetic
    rng = np.random.default_rng(0)
    items = [random_item(rng, n) for n in (60, 90, 12)]
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        worker = DeviceWorker(BaseModel.load(copy.deepcopy(model), dtype=dtype))
        adapter = random_adapter(worker.model, LoraConfig(rank=8))
        result = worker.run(pack([Request(adapter, items)]))[0]
        assert result.logprobs.dtype == result.grad.dtype == adapter.params.dtype == torch.float32
        results.append(result)
        worker.accumulate(adapter, result.grad)
        worker.optim_step([adapter], AdamParams())
        assert adapter.exp_avg.dtype == adapter.exp_avg_sq.dtype == adapter.params.dtype == torch.float32
    exact, rough = results
    dp = (rough.logprobs - exact.logprobs).abs()
    grad = ((rough.grad - exact.grad).norm() / exact.grad.norm()).item()
    loss = abs(rough.metrics["loss:sum"] / exact.metrics["loss:sum"] - 1)
    ROWS.append((build.__name__, f"{dp.mean():.4f}", f"{dp.max():.4f}", f"{grad:.4f}", f"{loss:.5f}"))
    print("", *("  ".join(f"{cell:>20}" for cell in row) for row in ROWS), sep="\n")
    assert dp.mean() < 0.05 and dp.max() < 0.5 and grad < 0.1 and loss < 0.02
