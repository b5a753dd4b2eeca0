"""The engine bench's model, data and rivals; run as a program it measures the peak memory of one case in a process of its own.

``python benches/engine_cases.py CASE`` prints {"extra_bytes": peak resident memory above what was there before, "seconds": …}.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

import numpy as np
import peft
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from spindle import losses
from spindle.compute.adapter import Adapter
from spindle.compute.batch import MicroBatch, Segment
from spindle.compute.head import Head, HeadTask
from spindle.compute.model import BaseModel
from spindle.types import LoraConfig

VOCAB, RANK = 32_000, 32
HEAD_ROWS, HEAD_VOCAB, HEAD_WIDTH = 2048, 151_936, 256


def qwen3_config(**overrides: object) -> Qwen3Config:
    """Qwen3-like, 8 layers of width 512, vocabulary 32,000."""
    shape = dict(
        vocab_size=VOCAB,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    return Qwen3Config(**(shape | overrides))


def qwen3(dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """That shape with random weights."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(qwen3_config(), dtype=dtype).eval()


def adapter_for(base: BaseModel, seed: int = 0, rank: int = RANK) -> Adapter:
    """An adapter whose B is not zero, so that every gradient is alive."""
    adapter = Adapter(base.layout(LoraConfig(rank=rank))).init(seed)
    generator = torch.Generator().manual_seed(seed)
    for _, b in adapter.weights().matrices.values():
        b.normal_(0.0, 0.02, generator=generator)
    return adapter


Row = tuple[np.ndarray, np.ndarray, np.ndarray]  # tokens [n], targets [n] or [n, k], weights of that shape


def rows(lengths, every: bool = True, width: int = 0, seed: int = 0) -> list[Row]:
    """One sequence per length. every: all rows weighted, else the last of each sequence alone."""
    rng = np.random.default_rng(seed)
    out = []
    for n in lengths:
        shape = (n, width) if width else (n,)
        weights = rng.normal(size=shape).astype(np.float32)
        if not every:
            weights[:-1] = 0
        out.append((rng.integers(0, VOCAB, n), rng.integers(0, VOCAB, shape), weights))
    return out


def ragged(seed: int = 0) -> np.ndarray:
    """16 lognormal lengths of 60 to 600 that sum to about 4,200."""
    lengths = np.random.default_rng(seed).lognormal(5.4, 0.6, 16)
    return np.clip(lengths * 4200 / lengths.sum(), 60, 600).astype(int)


def micro_batch(parts: list[tuple[Adapter, list[Row]]], backward: bool = True) -> MicroBatch:
    """A segment per part, cross_entropy."""
    flat = [row for _, data in parts for row in data]
    cat = lambda xs: torch.from_numpy(np.concatenate([x.reshape(-1) for x in xs]))  # noqa: E731
    segments, row, cell, seq = [], 0, 0, 0
    for adapter, data in parts:
        n, c = sum(len(t) for t, _, _ in data), sum(y.size for _, y, _ in data)
        inputs = {"weights": cat([w for _, _, w in data])}
        where = slice(seq, seq + len(data)), slice(row, row + n), slice(cell, cell + c)
        segments.append(Segment(adapter, "cross_entropy", dict(losses.get("cross_entropy").defaults), backward, *where, inputs))
        seq, row, cell = seq + len(data), row + n, cell + c
    return MicroBatch(
        cat([t for t, _, _ in flat]).int(),
        cat([y for _, y, _ in flat]),
        np.array([len(t) for t, _, _ in flat]),
        np.array([y.shape[1] if y.ndim == 2 else 0 for _, y, _ in flat]),
        segments,
    )


class Peft:
    """The rival: transformers + peft, right-padded batches, whole logits."""

    def __init__(self, model: PreTrainedModel, adapter: Adapter) -> None:
        lora = adapter.layout.lora
        targets = list(adapter.layout.target_modules)
        self.model = peft.get_peft_model(model, peft.LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets))
        own = dict(self.model.named_parameters())
        self.slots = [(s, own[s.name.replace(".weight", ".default.weight")]) for s in adapter.layout.slots]
        with torch.no_grad():
            for s, p in self.slots:
                p.copy_(adapter.params[s.offset : s.offset + s.numel].view(s.shape))

    def forward_backward(self, data: list[Row], size: int) -> tuple[torch.Tensor, float]:
        """Micro-batches of ``size`` sequences -> (logprobs end to end, loss); gradients are left on the parameters."""
        self.model.zero_grad()
        out, total = [], 0.0
        for start in range(0, len(data), size):
            part = data[start : start + size]
            longest = max(len(t) for t, _, _ in part)
            pad = lambda xs: torch.from_numpy(np.stack([np.pad(x, (0, longest - len(x))) for x in xs])).to(self.model.device)  # noqa: B023, E731
            tokens, targets, weights = (pad([row[i] for row in part]) for i in range(3))
            mask = pad([np.ones(len(t), np.int64) for t, _, _ in part])
            logits = self.model(input_ids=tokens, attention_mask=mask, use_cache=False).logits
            p = torch.log_softmax(logits.float(), -1).gather(2, targets[:, :, None])[:, :, 0]
            loss = -(weights * p).sum()
            loss.backward()
            total += loss.item()
            out += [p[i, : len(t)].detach() for i, (t, _, _) in enumerate(part)]
        return torch.cat(out), total

    def assert_grads(self, flat: torch.Tensor) -> None:
        for s, p in self.slots:
            got = flat[s.offset : s.offset + s.numel].view(s.shape)
            assert (got - p.grad).norm() <= 1e-3 * p.grad.norm(), f"the rival's gradient of {s.name} differs"


def head_case() -> tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]]:
    """(ours, full): the head alone, forward and backward, both returning [logprobs; the gradient of the hidden states, flattened]."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(HEAD_VOCAB, HEAD_WIDTH, generator=generator) * 0.1
    hidden = torch.randn(HEAD_ROWS, HEAD_WIDTH, generator=generator)
    targets = torch.randint(0, HEAD_VOCAB, (HEAD_ROWS,), generator=generator)
    everything = slice(0, HEAD_ROWS)
    head = Head(weight, None, "lm_head")

    def ours() -> torch.Tensor:
        task = HeadTask(everything, everything, None, lambda p, lo, hi: torch.full_like(p, -1.0))
        p, dhidden = head.run(hidden, [task], np.arange(HEAD_ROWS), targets)
        return torch.cat([p, dhidden.flatten()])

    def full() -> torch.Tensor:
        h = hidden.clone().requires_grad_()
        p = torch.log_softmax(h @ weight.t(), -1).gather(1, targets[:, None])[:, 0]
        (-p.sum()).backward()
        return torch.cat([p.detach(), h.grad.flatten()])

    return ours, full


def best(run: Callable[[], object], rounds: int = 3) -> float:
    """The least of ``rounds`` times, in seconds."""
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _peak() -> int:
    """The most that was ever resident in this program. Not ru_maxrss: that starts from the size of the process that started this one."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM:")) * 1024


def memory_case(name: str) -> Callable[[], object]:
    from spindle.compute.worker import DeviceWorker

    if name.startswith("head"):
        return head_case()[name == "head_full"]
    model = qwen3()
    data = rows([512] * 16)
    if name == "peft":
        rival = Peft(model, adapter_for(BaseModel.load(qwen3(), check=False)))
        return lambda: rival.forward_backward(data, 16)
    base = BaseModel.load(model, check=False)
    worker = DeviceWorker(base, activation_budget=0 if name == "ours_checkpointed" else None)
    batch = micro_batch([(adapter_for(base), data)])
    return lambda: worker.run(batch)


def adapters_case() -> dict[str, float]:
    """1,024 adapters on a tiny base: bytes over their flat bytes, and the time to make them."""
    from spindle.compute.layout import LoraTarget, build_layout

    targets = [LoraTarget(f"model.layers.{i}.self_attn.{m}", 64, 64, "attn") for i in range(2) for m in ("q_proj", "v_proj", "o_proj")]
    layout = build_layout(LoraConfig(rank=32), targets)
    Adapter(layout).init(0)
    before, started = _resident(), time.perf_counter()
    adapters = [Adapter(layout).init(i) for i in range(1024)]
    seconds = time.perf_counter() - started
    return {"idle_over_flat": (_resident() - before) / (1024 * 3 * 4 * layout.numel), "create_1024_s": seconds, "made": len(adapters)}


if __name__ == "__main__":
    if sys.argv[1] == "adapters":
        print(json.dumps(adapters_case()))
    else:
        run = memory_case(sys.argv[1])
        before, started = _resident(), time.perf_counter()
        run()
        print(json.dumps({"extra_bytes": _peak() - before, "seconds": time.perf_counter() - started}))
