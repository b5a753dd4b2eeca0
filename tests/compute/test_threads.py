"""The same bits at any fixed number of threads, odd ones too: neighbours are not felt, and parts equal the whole.

torch decides per product how to divide it, so each count runs in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys

import numpy as np
import torch

torch.set_num_threads(int(sys.argv[1]))
from spindle.compute.model import BaseModel
from spindle.compute.worker import DeviceWorker
from spindle.types import LoraConfig
from tests.compute.helpers import Request, pack, random_adapter, random_item
from tests.compute.test_exact import assert_same_bits
from tests.tiny import tiny_qwen3

worker = DeviceWorker(BaseModel.load(tiny_qwen3(), check=False))
assert_same_bits(worker, 3, 7)

rng = np.random.default_rng(0)
adapter = random_adapter(worker.model, LoraConfig(rank=5))
items = [random_item(rng, n) for n in (37, 1, 130, 18)]
whole = worker.run(pack([Request(adapter, items)]))[0]
for cuts in ((1, 1, 1, 1), (1, 3), (2, 2)):
    parts, at = [], 0
    for count in cuts:
        parts.append(worker.run(pack([Request(adapter, items[at : at + count])]))[0])
        at += count
    assert torch.equal(torch.cat([part.logprobs for part in parts]), whole.logprobs), cuts
    error = (sum(part.grad for part in parts) - whole.grad).norm() / whole.grad.norm()
    assert error <= 1e-6, (cuts, error)
    total = sum(part.metrics["loss:sum"] for part in parts)
    assert abs(total - whole.metrics["loss:sum"]) <= 1e-6 * abs(total), cuts
print(torch.get_num_threads())
"""


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_same_bits(threads):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(threads)],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == [str(threads)]
