"""One adapter on disk, in PEFT's layout, so that peft, vLLM and SGLang load it as it is.

adapter_config.json          what PEFT needs
adapter_model.safetensors    float32 LoRA matrices under PEFT's names
optimizer.safetensors        exp_avg and exp_avg_sq per matrix (only when saved with the optimizer)
spindle.json                 LoRA shape, order of the flat buffer, step count, metadata

A directory of peft's own, with the first two files alone, is read too: ``spindle/store/peft_directory.py`` says which.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from spindle.compute.source import is_model_directory
from spindle.errors import InvalidRequest, ServerError
from spindle.store.files import new_directory
from spindle.store.flat_tensors import Slot, difference, read_flat, write_flat
from spindle.store.peft_directory import CONFIG, WEIGHTS, describe_peft
from spindle.types import LoraConfig

__all__ = ["LoadedAdapter", "OptimizerState", "load_adapter", "read_description", "save_adapter"]

FORMAT = 1


class Layout(Protocol):
    @property
    def lora(self) -> LoraConfig: ...
    @property
    def slots(self) -> tuple[Any, ...]: ...
    @property
    def numel(self) -> int: ...
    @property
    def target_modules(self) -> tuple[str, ...]: ...
    @property
    def target_parameters(self) -> tuple[str, ...]: ...


class OptimizerState(NamedTuple):
    """Moments of the flat buffer, [P] float32 each, and the number of steps taken."""

    exp_avg: np.ndarray
    exp_avg_sq: np.ndarray
    step: int


@dataclass(frozen=True, eq=False)
class LoadedAdapter:
    """params: [P] float32 in the order of the layout given to ``load_adapter`` (or of the one it was saved with)."""

    lora: LoraConfig
    params: np.ndarray
    optimizer: OptimizerState | None
    base_model: str
    metadata: dict[str, Any]


class _Slot(NamedTuple):
    name: str
    shape: tuple[int, ...]
    offset: int


def save_adapter(
    path: str | os.PathLike[str],
    layout: Layout,
    params: Any,
    base_model: str,
    optimizer: tuple[Any, Any, int] | None = None,
    metadata: Mapping[str, Any] | None = None,
    replace: bool = False,
) -> None:
    """Write an adapter to the directory ``path``: it is whole there, or not there at all.

    params: [P] float32 (numpy or CPU torch). optimizer: (exp_avg [P], exp_avg_sq [P], step).
    Raises InvalidRequest when ``path`` exists and ``replace`` is false.
    """
    with new_directory(path, replace) as directory:
        write_flat(directory / WEIGHTS, layout.slots, {"": params}, {"format": "pt"})
        if optimizer is not None:
            moments = {"exp_avg.": optimizer[0], "exp_avg_sq.": optimizer[1]}
            write_flat(directory / "optimizer.safetensors", layout.slots, moments, {"step": str(int(optimizer[2]))})
        _write_json(directory / CONFIG, _peft_config(layout, base_model))
        _write_json(
            directory / "spindle.json",
            {
                "format": FORMAT,
                "base_model": base_model,
                "lora": asdict(layout.lora),
                "step": None if optimizer is None else int(optimizer[2]),
                "slots": [[slot.name, list(slot.shape), slot.offset] for slot in layout.slots],
                "numel": layout.numel,
                "metadata": dict(metadata or {}),
            },
        )


def load_adapter(path: str | os.PathLike[str], layout: Layout | None = None, with_optimizer: bool = False) -> LoadedAdapter:
    """Read an adapter that ``save_adapter`` or peft wrote.

    With a ``layout`` the buffers come in its order, rank and alpha must be its own, and every matrix must be there with its shape.
    Raises NotFound when there is none, InvalidRequest when it is a whole model, does not fit or holds no optimizer state.
    """
    description = read_description(path)
    slots: tuple[Slot, ...]
    if layout is None:
        slots = tuple(_Slot(name, tuple(shape), offset) for name, shape, offset in description["slots"])
        numel = description["numel"]
    else:
        _check_fits(description, layout)
        slots, numel = layout.slots, layout.numel
    directory = Path(path)
    optimizer = None
    if with_optimizer:
        if "from_peft" in description:
            raise InvalidRequest(f"{directory} was written by peft, which keeps no optimizer state: load its weights only")
        if description["step"] is None:
            raise InvalidRequest("this checkpoint was saved without optimizer state: load its weights only")
        moments = [read_flat(directory / "optimizer.safetensors", slots, numel, prefix) for prefix in ("exp_avg.", "exp_avg_sq.")]
        optimizer = OptimizerState(moments[0], moments[1], description["step"])
    return LoadedAdapter(
        lora=LoraConfig(**description["lora"]),
        params=read_flat(directory / WEIGHTS, slots, numel),
        optimizer=optimizer,
        base_model=description["base_model"],
        metadata=description["metadata"],
    )


def read_description(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What ``spindle.json`` says, or would say of a directory that peft wrote, without reading a tensor.

    Raises NotFound, InvalidRequest for a model's directory or what means nothing here, or ServerError when it is damaged.
    """
    directory = Path(path)
    file = directory / "spindle.json"
    try:
        text = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        text = None
    if text is None:
        if is_model_directory(directory):
            raise InvalidRequest(
                f"{directory} is a transformers model directory (a base model, or an adapter merged into one by save(..., "
                "merged=True)), not a checkpoint of an adapter. Use it as a model: spindle serve, spindle.Engine and transformers load it. "
                "Needed here is a directory that save(...) wrote without merged=True"
            )
        return describe_peft(directory)
    try:
        description = json.loads(text)
    except ValueError as error:
        raise ServerError(f"{file} is damaged: {error}") from error
    if description.get("format") != FORMAT:
        raise ServerError(f"{file} has format {description.get('format')!r}, this version reads format {FORMAT}")
    return description


def _check_fits(description: Mapping[str, Any], layout: Layout) -> None:
    """Raises InvalidRequest when the adapter is of another shape than the layout. The matrices' own shapes are for ``read_flat``."""
    saved, wanted = description["lora"], asdict(layout.lora)
    for key in ("rank", "alpha"):
        if saved[key] != wanted[key]:
            raise InvalidRequest(
                f"{key}: the checkpoint's is {saved[key]}, this adapter's {wanted[key]}; they must be equal: create the adapter with "
                f"{key}={saved[key]}"
            )
    what = difference({name for name, *_ in description["slots"]}, {slot.name for slot in layout.slots})
    if what is None:
        return
    flags = ("train_attn", "train_mlp", "train_unembed")
    here = ", ".join(f"{flag}={wanted[flag]}" for flag in flags)
    advice = ""
    if any(saved[flag] != wanted[flag] for flag in flags):
        there = ", ".join(f"{flag}={saved[flag]}" for flag in flags)
        advice = f"; it is of an adapter with {there}, this one has {here}: create it with the checkpoint's"
    elif "from_peft" in description:
        names = ", ".join((*layout.target_modules, *layout.target_parameters))
        advice = (
            f"; with {here} an adapter has {names} in every layer and nothing else: no choice of the three gives what target_modules names"
        )
    raise InvalidRequest(f"{WEIGHTS} {what}{advice}")


def _peft_config(layout: Layout, base_model: str) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": layout.lora.rank,
        "lora_alpha": layout.lora.alpha,
        "target_modules": sorted(layout.target_modules),
        "target_parameters": sorted(layout.target_parameters) or None,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
    }


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")
