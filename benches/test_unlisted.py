"""What unlisted_logprobs="skip" saves: a classifier's body (1,631 tokens, five targets a row in CSR, one labelled row) through the engine,
with and without, interleaved, in processor seconds; the labelled logprobs and the metrics are checked to be the same.

SPINDLE_BENCH_ROUNDS: timed rounds per figure (3).
"""

from __future__ import annotations

import os
import time

import numpy as np
import pytest
import torch
from engine_cases import RANK, VOCAB, qwen3

import spindle
from spindle.compute.model import BaseModel

pytestmark = [pytest.mark.timeout(600), pytest.mark.benchmark(group="unlisted")]
ROUNDS = int(os.environ.get("SPINDLE_BENCH_ROUNDS", "3"))
N, K = 1631, 5


def classifier() -> spindle.Datum:
    rng = np.random.default_rng(0)
    targets, weights = torch.zeros(N, K, dtype=torch.int64), torch.zeros(N, K)
    targets[-1], weights[-1, 2] = torch.from_numpy(rng.integers(1, VOCAB, K)), 1.0
    return spindle.Datum(rng.integers(0, VOCAB, N), {"target_tokens": targets.to_sparse_csr(), "weights": weights.to_sparse_csr()})


def test_one_labelled_row(benchmark, figures):
    base, data = BaseModel.load(qwen3()), [classifier()]
    seconds: dict[tuple[str, str], list[float]] = {}
    answers = {}
    with spindle.Engine(base) as whole, spindle.Engine(base, unlisted_logprobs="skip") as skipping:
        adapters = {"compute": whole.create_adapter(RANK, seed=0), "skip": skipping.create_adapter(RANK, seed=0)}
        for _ in range(ROUNDS):
            for mode, adapter in adapters.items():
                for call in ("forward_backward", "forward"):
                    started = time.process_time()
                    answers[mode, call] = getattr(adapter, call)(data).result(300)
                    seconds.setdefault((mode, call), []).append(time.process_time() - started)
    for call in ("forward_backward", "forward"):
        a, b = (answers[mode, call] for mode in ("compute", "skip"))
        assert np.array_equal(a.loss_fn_outputs[0]["logprobs"][-1], b.loss_fn_outputs[0]["logprobs"][-1]) and a.metrics == b.metrics
        assert a.loss_fn_outputs[0]["logprobs"][:-1].all() and not b.loss_fn_outputs[0]["logprobs"][:-1].any()
        figures[f"compute_over_skip_{call}"] = min(seconds["compute", call]) / min(seconds["skip", call])
        figures[f"skip_{call}_s"] = min(seconds["skip", call])
    benchmark.pedantic(lambda: None, rounds=1)
