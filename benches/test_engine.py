"""The compute engine against transformers + peft, torch's own optimizer and the machine's matrix rate. Every rival's answer is checked.

SPINDLE_BENCH_ROUNDS: timed rounds per figure (3).
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_cases import RANK, VOCAB, Peft, adapter_for, best, head_case, micro_batch, qwen3, ragged, rows
from torch.nn.utils import clip_grad_norm_
from torch.utils.flop_counter import FlopCounterMode

from spindle import optim
from spindle.compute.adapter import Adapter
from spindle.compute.layout import LoraTarget, build_layout
from spindle.compute.model import BaseModel
from spindle.compute.worker import DeviceWorker
from spindle.types import AdamParams, LoraConfig

pytestmark = [pytest.mark.timeout(1800), pytest.mark.benchmark(group="engine")]
ROUNDS = int(os.environ.get("SPINDLE_BENCH_ROUNDS", "3"))


@pytest.fixture(scope="module")
def model():
    return qwen3()


@pytest.fixture(scope="module")
def worker(model):
    return DeviceWorker(BaseModel.load(copy.deepcopy(model)))


def once(benchmark, seconds: float) -> None:
    """Our own timing, in pytest-benchmark's table."""
    benchmark.extra_info["seconds"] = seconds
    benchmark.pedantic(lambda: None, rounds=1)


def matrix_rate() -> float:
    """FLOP/s of a 1,024 x 2,048 x 2,048 product."""
    a, b = torch.randn(1024, 2048), torch.randn(2048, 2048)
    return 2 * 1024 * 2048 * 2048 / best(lambda: a @ b, 10)


def minimum_flops(base: BaseModel, lengths, head_rows_back: int) -> float:
    """4 x base parameters x tokens (the head's backward: weighted rows only) + causal attention + LoRA."""
    tokens = int(np.sum(lengths))
    maps = sum(t.in_features * t.out_features for t in base.targets if t.kind != "unembed")
    low_rank = sum(RANK * (t.in_features + t.out_features) for t in base.targets if t.kind != "unembed")
    head = base.targets[-1]
    head_maps, head_low = head.in_features * head.out_features, RANK * (head.in_features + head.out_features)
    width = base.config.num_attention_heads * base.config.head_dim * base.config.num_hidden_layers
    attention = 3.5 * 2 * float(np.sum(np.square(np.asarray(lengths, float)))) * width  # half of each square; backward is 2.5 times forward
    return 4 * maps * tokens + 6 * low_rank * tokens + 2 * (head_maps + head_low) * (tokens + head_rows_back) + attention


@pytest.mark.parametrize("every", [False, True], ids=["one_row", "all_rows"])
def test_ragged_against_peft(benchmark, figures, model, worker, every):
    lengths = ragged()
    adapter = adapter_for(worker.model)
    data = rows(lengths, every)
    batch = micro_batch([(adapter, data)])
    rival = Peft(copy.deepcopy(model), adapter)
    result = worker.run(batch)[0]
    theirs, ours = {}, []
    for size in (1, 4, 16):  # interleaved: ours, theirs, ours, theirs
        ours.append(best(lambda: worker.run(batch), ROUNDS))
        theirs[size] = best(lambda size=size: rival.forward_backward(data, size), max(1, ROUNDS - 1))
        p, loss = rival.forward_backward(data, size)
        assert (p - result.logprobs).abs().max() <= 1e-4 and abs(loss / result.metrics["loss:sum"] - 1) <= 1e-3
        rival.assert_grads(result.grad)
    seconds = min(ours)
    figures["tokens"] = int(lengths.sum())
    figures[f"ours_{'all_rows' if every else 'one_row'}_s"] = seconds
    figures["peft_over_ours_all_rows" if every else "peft_over_ours_one_row"] = min(theirs.values()) / seconds
    if every:
        figures["peft16_over_ours_all_rows"] = theirs[16] / seconds
        flops = minimum_flops(worker.model, lengths, int(lengths.sum()))
        figures["matrix_rate_share"] = flops / seconds / matrix_rate()
    once(benchmark, seconds)


def test_flops_executed(benchmark, figures, worker):
    """Attention is counted apart: torch's counter does not know the CPU kernel."""
    lengths = ragged() // 4
    batch = micro_batch([(adapter_for(worker.model), rows(lengths))])
    product = lambda _, a, b, *rest, **kwargs: 2 * a[0] * a[1] * b[1]  # noqa: E731
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: product}) as counter:
        worker.run(batch)
    attention = minimum_flops(worker.model, lengths, 0) - minimum_flops(worker.model, np.ones(int(lengths.sum())), 0)
    figures["flops_over_minimum"] = (counter.get_total_flops() + attention) / minimum_flops(worker.model, lengths, int(lengths.sum()))
    once(benchmark, 0.0)


def test_bfloat16(benchmark, figures, model):
    """Only where the CPU multiplies bfloat16 natively; elsewhere there is nothing to win."""
    if not ("avx512_bf16" in Path("/proc/cpuinfo").read_text() or "amx_bf16" in Path("/proc/cpuinfo").read_text()):
        pytest.skip("this CPU has no bfloat16 instructions")
    seconds = []
    for dtype in (torch.float32, torch.bfloat16):
        worker = DeviceWorker(BaseModel.load(copy.deepcopy(model), dtype=dtype))
        batch = micro_batch([(adapter_for(worker.model), rows(ragged()))])
        worker.run(batch)
        seconds.append(best(lambda worker=worker, batch=batch: worker.run(batch), ROUNDS))
    figures["float32_over_bfloat16"] = seconds[0] / seconds[1]
    once(benchmark, seconds[1])


@pytest.mark.parametrize("n", [4, 16, 64, 256])
def test_32_adapters_in_one_pass(benchmark, figures, worker, n):
    parts = [(adapter_for(worker.model, seed), rows([n], seed=seed)) for seed in range(32)]
    mixed, serial = micro_batch(parts), [micro_batch([part]) for part in parts]
    together, apart = worker.run(mixed), [worker.run(one)[0] for one in serial]
    for a, b in zip(together, apart, strict=True):
        assert torch.equal(a.grad, b.grad) and torch.equal(a.logprobs, b.logprobs)
    del together, apart
    rounds = ROUNDS if n < 256 else 1
    mixed_s = best(lambda: worker.run(mixed), rounds)
    serial_s = best(lambda: [worker.run(one) for one in serial] and None, max(1, rounds - 1))
    figures[f"serial_over_mixed_{n}"] = serial_s / mixed_s
    once(benchmark, mixed_s)


def measured(case: str) -> dict[str, float]:
    """engine_cases.py in a process of its own."""
    out = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("engine_cases.py")), case], check=True, capture_output=True, text=True
    )
    return json.loads(out.stdout.splitlines()[-1])


def test_head(benchmark, figures):
    ours, full = head_case()
    a, b = ours(), full()
    assert (a - b).abs().max() <= 1e-4
    ours_s, full_s = best(ours, ROUNDS), best(full, ROUNDS)
    figures["head_time_over_full"] = ours_s / full_s
    figures["head_extra_gb"] = measured("head_ours")["extra_bytes"] / 1e9
    figures["head_full_extra_gb"] = measured("head_full")["extra_bytes"] / 1e9
    once(benchmark, ours_s)


def test_classifier_visits_labelled_rows_only(benchmark, figures, worker):
    adapter = adapter_for(worker.model)
    seconds = {}
    for every in (True, False):
        batch = micro_batch([(adapter, rows([1631], every, width=5))])
        worker.run(batch)
        seconds[every] = best(lambda batch=batch: worker.run(batch), ROUNDS)
    figures["dense_over_sparse_rows"] = seconds[True] / seconds[False]
    once(benchmark, seconds[False])


def test_memory(benchmark, figures):
    theirs = measured("peft")["extra_bytes"]
    checkpointed = measured("ours_checkpointed")
    figures["memory_over_peft"] = checkpointed["extra_bytes"] / theirs
    figures["memory_over_peft_without_checkpointing"] = measured("ours")["extra_bytes"] / theirs
    figures["memory_peft_gb"] = theirs / 1e9
    once(benchmark, checkpointed["seconds"])


def test_adamw(benchmark, figures):
    """Rank 32 over 200 matrices: one flat buffer against torch's fused AdamW over the list. Our time includes the gradient norm, which
    the second figure adds to the rival's. Both optimizers are bound by the same memory traffic: 28 bytes a parameter."""
    targets = [LoraTarget(f"model.layers.{i}.self_attn.q_proj", 1024, 1024, "attn") for i in range(100)]
    ours = Adapter(build_layout(LoraConfig(rank=32), targets)).init(0)
    matrices = [torch.nn.Parameter(m.clone()) for pair in ours.weights().matrices.values() for m in pair]
    rival = torch.optim.AdamW(matrices, 1e-4, (0.9, 0.95), 1e-12, 0.0, fused=True)
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(ours.layout.numel, generator=generator)
    for s, m in zip(ours.layout.slots, matrices, strict=True):
        m.grad = grad[s.offset : s.offset + s.numel].view(s.shape).clone()

    def flat() -> None:
        ours.grads = grad
        optim.step(ours, AdamParams())

    flat_s, list_s = best(flat, 10 * ROUNDS), best(rival.step, 10 * ROUNDS)
    for s, m in zip(ours.layout.slots, matrices, strict=True):
        assert (ours.params[s.offset : s.offset + s.numel].view(s.shape) - m).abs().max() <= 1e-6
    figures["list_over_flat_adamw"] = list_s / flat_s
    figures["list_with_norm_over_flat_adamw"] = best(lambda: (clip_grad_norm_(matrices, 1e9), rival.step()), 10 * ROUNDS) / flat_s
    once(benchmark, flat_s)


def test_idle_adapters(benchmark, figures):
    made = measured("adapters")
    figures["idle_over_flat"], figures["create_1024_s"] = made["idle_over_flat"], made["create_1024_s"]
    once(benchmark, made["create_1024_s"])


def test_vocabulary_is_what_the_figures_say(worker):
    assert worker.model.vocab_size == VOCAB
