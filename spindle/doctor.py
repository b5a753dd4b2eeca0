"""``spindle doctor``: is everything here that Spindle needs, and does it compute the right thing?"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

PACKAGES = {  # distribution: the extra that brings it, "" for always
    "torch": "",
    "transformers": "",
    "peft": "",
    "numpy": "",
    "safetensors": "",
    "protobuf": "",
    "starlette": "server",
    "uvicorn": "server",
    "msgspec": "server",
    "tinker": "demo",
    "gguf": "demo",
    "matplotlib": "demo",
    "modal": "modal",
}


def versions() -> dict[str, str]:
    """Distribution -> version, or how to get it."""
    found = {}
    for name, extra in PACKAGES.items():
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = f'missing: pip install -e ".[{extra}]" where Spindle lies' if extra else "missing: make setup where Spindle lies"
    return found


def devices() -> dict[str, str]:
    """What ``--devices`` could name here."""
    import torch

    found = {"cpu": f"{os.cpu_count()} cores, {torch.get_num_threads()} torch threads, {torch.backends.cpu.get_cpu_capability()}"}
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        found[f"cuda:{index}"] = f"{about.name}, {about.total_memory / 2**30:.0f} GiB"
    return found


def self_check() -> list[tuple[str, bool, str]]:
    """A random two-layer model trained for three steps: (what, whether it holds, what was seen). Takes seconds."""
    import numpy as np
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from spindle import AdamParams, Datum, codec
    from spindle.compute.model import BaseModel
    from spindle.engine import Engine

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
    tokens = np.random.default_rng(0).integers(0, 256, (2, 33))
    data = [Datum(row[:-1], {"target_tokens": row[1:], "weights": np.ones(32, np.float32)}) for row in tokens]
    with torch.no_grad():
        logits = torch.log_softmax(model(torch.tensor(tokens[:, :-1])).logits.double(), -1)
    expected = logits.gather(-1, torch.tensor(tokens[:, 1:, None]))[..., 0].numpy()

    checks = []
    base = BaseModel.load(model)
    with Engine(base, devices=["cpu"]) as engine:
        adapter = engine.create_adapter(rank=8, seed=0)
        results = []
        for _ in range(3):
            results.append(adapter.forward_backward(data, "cross_entropy"))
            adapter.optim_step(AdamParams(learning_rate=1e-2)).result()
        first, last = results[0].result(), results[-1].result()
        error = max(np.abs(got["logprobs"] - want).max() for got, want in zip(first.loss_fn_outputs, expected, strict=True))
        checks.append(("logprobs equal transformers' to 1e-4", bool(error < 1e-4), f"largest difference {error:.1e}"))
        checks.append(("the loss falls", last.loss < first.loss, f"{first.loss:.2f} → {last.loss:.2f} in 3 steps"))
        handle = engine.create_adapter(rank=8, seed=0)
        body = codec.encode_request(handle.model_id, 1, data, "cross_entropy", zstd=False)
        wire = codec.decode_forward_backward(engine.submit(body).result())
        checks.append(("a request as bytes answers as one in process", wire.loss == first.loss, f"{wire.loss:.6f} and {first.loss:.6f}"))
    with Engine(base, devices=["cpu", "cpu"], layers_per_device=1) as engine:
        spread = engine.create_adapter(rank=8, seed=0).forward(data, "cross_entropy").result()
        error = max(np.abs(got["logprobs"] - want).max() for got, want in zip(spread.loss_fn_outputs, expected, strict=True))
        checks.append(("those of a model spread over two devices do too", bool(error < 1e-4), f"largest difference {error:.1e}"))
    return checks


def _row(table: Table, name: str, value: str, good: bool | None = None) -> None:
    mark = "" if good is None else "[green]✓[/]" if good else "[red]✗[/]"
    table.add_row(mark, name, escape(value))


def report(console: Console, check: Callable[[], list[tuple[str, bool, str]]] = self_check) -> bool:
    """Print it all; returns whether Spindle works here."""
    import spindle

    table = Table.grid(padding=(0, 2))
    _row(table, "spindle", f"{spindle.__version__} in {Path(spindle.__file__).parent}")
    _row(table, "python", f"{platform.python_version()} on {platform.platform()}")
    good = True
    for name, version in versions().items():
        present = not version.startswith("missing")
        needed = PACKAGES[name] == ""
        good &= present or not needed
        _row(table, name, version, present if needed else True if present else None)
    try:
        for name, about in devices().items():
            _row(table, name, about, True)
    except ImportError as error:
        good = False
        _row(table, "devices", str(error), False)
    try:
        from spindle.codec import built_with

        built = ", ".join(f"{key} {value}" for key, value in built_with.items())
        _row(table, "extension", built, True)
    except ImportError as error:
        good = False
        _row(table, "extension", f"not built: {error}. In a checkout: make setup", False)
    free = shutil.disk_usage(Path.home()).free / 2**30
    _row(table, "free disk", f"{free:.1f} GiB in {Path.home()}", free > 1)
    if good:
        began = time.monotonic()
        try:
            for name, holds, seen in check():
                good &= holds
                _row(table, name, seen, holds)
        except Exception as error:
            good = False
            _row(table, "self-check", f"{type(error).__name__}: {error}", False)
        _row(table, "self-check", f"{time.monotonic() - began:.1f} s")
    console.print(table)
    console.print("[green]Spindle works here.[/]" if good else "[red]Something is missing or wrong: see ✗ above.[/]")
    return good
