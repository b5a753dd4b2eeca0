"""The engine's figures on one GPU, in about two minutes: ``python benches/gpu/engine.py [MODEL] [--dtype bfloat16]``.

Prints one line of JSON. Without MODEL: the engine bench's Qwen3-like model with random weights. Answers are checked before they are timed.
With two GPUs or more, also the model spread over two of them beside the same model on one: answers, weights per GPU, micro-batches at once.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from engine_cases import Peft, adapter_for, micro_batch, qwen3, ragged, rows

from spindle.compute.adapter import Adapter
from spindle.compute.attention import varlen_attn
from spindle.compute.groups import group_devices
from spindle.compute.model import BaseModel
from spindle.compute.worker import DeviceWorker


def seconds(run: Callable[[], object], rounds: int = 5) -> float:
    """The least wall time of ``rounds``, the device drained before and after."""
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return min(times)


def peak_bytes(run: Callable[[], object]) -> int:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def spread_over_two(base: BaseModel, data) -> dict[str, object]:
    """The model on cuda:0 and cuda:1 beside ``base``, all of it on cuda:0. One thread runs micro-batches, then two as an engine does."""
    devices = [torch.device("cuda", i) for i in range(2)]
    before = [torch.cuda.memory_allocated(device) for device in devices]
    groups, per_device = group_devices(base, devices, -(-base.config.num_hidden_layers // 2))
    models = [base.replica(groups[0], per_device)]
    models.append(models[0].replica(groups[0], per_device))
    added = [torch.cuda.memory_allocated(device) - b for device, b in zip(devices, before, strict=True)]
    models[0].check()
    alone, *workers = (DeviceWorker(model) for model in (base, *models))
    adapters = [adapter_for(model) for model in (base, models[0])]
    batches = [micro_batch([(Adapter(a.layout, "cuda:0"), data)]) for a in adapters]
    for adapter, batch in zip(adapters, batches, strict=True):
        batch.segments[0].adapter.params.copy_(adapter.params)
    want, got = alone.run(batches[0])[0], workers[0].run(batches[1])[0]
    error = (got.logprobs - want.logprobs).abs().max().item()
    gradient_error = ((got.grad - want.grad).norm() / want.grad.norm()).item()
    assert got.grad.device == devices[0] and error < (0.5 if base.dtype == torch.bfloat16 else 1e-3) and gradient_error < 0.05

    def several(workers, each: int = 4) -> None:
        threads = [threading.Thread(target=lambda w=w: [w.run(batches[1]) for _ in range(each)]) for w in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        torch.cuda.synchronize(devices[1])

    one, two = seconds(lambda: several(workers[:1]), 3), seconds(lambda: several(workers), 3)
    return {
        "spread_logprob_error": error,
        "spread_gradient_error": gradient_error,
        "spread_repeats_bit_for_bit": bool(torch.equal(got.grad, workers[1].run(batches[1])[0].grad)),
        "spread_gb_on_cuda_1": added[1] / 1e9,
        "spread_over_alone": one / seconds(lambda: [alone.run(batches[0]) for _ in range(4)], 3),
        "spread_two_at_once_speedup": 2 * one / two,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    source = options.model or qwen3()
    reference = None if options.model else DeviceWorker(BaseModel.load(copy.deepcopy(source), dtype=torch.float32))
    base = BaseModel.load(copy.deepcopy(source), device="cuda", dtype=dtype)
    worker = DeviceWorker(base)
    host = adapter_for(BaseModel.load(copy.deepcopy(source), check=False)) if reference is None else adapter_for(reference.model)

    def on_gpu(seed: int = 0):
        adapter = type(host)(host.layout, "cuda").init(seed)
        if seed == 0:
            adapter.params.copy_(host.params)
        return adapter

    adapter, data = on_gpu(), rows(ragged())
    batch = micro_batch([(adapter, data)])
    result = worker.run(batch)[0]
    figures: dict[str, object] = {"device": torch.cuda.get_device_name(), "dtype": options.dtype, "varlen": varlen_attn is not None}
    if reference is not None:
        small = micro_batch([(adapter, data[:2])]), micro_batch([(host, data[:2])])
        p, q = (w.run(b)[0] for w, b in zip((worker, reference), small, strict=True))
        figures["max_logprob_error"] = (p.logprobs - q.logprobs).abs().max().item()
        figures["gradient_error"] = ((p.grad.cpu() - q.grad).norm() / q.grad.norm()).item()
        assert figures["max_logprob_error"] < (0.5 if dtype == torch.bfloat16 else 1e-3)
    again = worker.run(batch)[0]
    figures["repeats_bit_for_bit"] = bool(torch.equal(result.grad, again.grad))
    tokens = int(ragged().sum())
    spent = seconds(lambda: worker.run(batch))
    figures |= {"tokens_per_s": tokens / spent, "peak_gb": peak_bytes(lambda: worker.run(batch)) / 1e9}
    worker.activation_budget = 0
    figures["checkpointed_over_plain"] = seconds(lambda: worker.run(batch)) / spent
    figures["checkpointed_peak_gb"] = peak_bytes(lambda: worker.run(batch)) / 1e9
    worker.activation_budget = None
    for n in (16, 256):
        parts = [(on_gpu(seed), rows([n], seed=seed)) for seed in range(32)]
        mixed, serial = micro_batch(parts), [micro_batch([part]) for part in parts]
        figures[f"serial_over_mixed_{n}"] = seconds(lambda serial=serial: [worker.run(b) for b in serial]) / seconds(
            lambda mixed=mixed: worker.run(mixed)
        )
    if reference is not None:
        rival = Peft(copy.deepcopy(source).to("cuda", dtype), adapter)
        figures["peft16_over_ours_all_rows"] = seconds(lambda: rival.forward_backward(data, 16)) / spent
    if torch.cuda.device_count() > 1:
        figures |= spread_over_two(base, data)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
