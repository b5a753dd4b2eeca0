"""What a directory that peft's ``save_pretrained`` wrote holds, told as ``spindle.json`` would tell it.

Taken only where it means the same here: plain LoRA of one rank and one alpha, nothing trained beside its matrices, the base model as it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

from spindle.compute.layout import LORA_A, LORA_B, PREFIX, kind_of
from spindle.errors import InvalidRequest, NotFound, ServerError
from spindle.store.flat_tensors import read_shapes
from spindle.types import FLOAT32_MAX, LoraConfig

__all__ = ["CONFIG", "WEIGHTS", "describe_peft"]

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_ALLOWED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "bias": ("none", None),
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),  # with any other, peft changes the base model's weights
}
_READ = {"r", "lora_alpha", "target_modules", "target_parameters"}
_SAYS_NOTHING = {  # of what the weights mean
    "auto_mapping",
    "base_model_name_or_path",
    "eva_config",
    "inference_mode",
    "lora_dropout",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
}


def describe_peft(directory: Path) -> dict[str, Any]:
    """As ``read_description``, without reading a tensor's data.

    Raises NotFound when one of the two files is missing, InvalidRequest naming what has no equal here, ServerError when one is damaged.
    """
    for name, other in ((CONFIG, WEIGHTS), (WEIGHTS, CONFIG)):
        if not (directory / name).is_file():
            beside = f": it holds {other} but no {name}" if (directory / other).is_file() else ""
            raise NotFound(f"no checkpoint at {directory}{beside}")
    config = _read_config(directory / CONFIG)
    _check_config(config)
    rank, alpha = config["r"], float(config["lora_alpha"])
    shapes = read_shapes(directory / WEIGHTS)
    paths = _paths(shapes, rank)
    _check_targets(config, paths)
    kinds = {kind_of(path) for path in paths}
    slots, end = [], 0
    for name, shape in shapes.items():
        slots.append([name, list(shape), end])
        end += prod(shape)
    return {
        "base_model": config.get("base_model_name_or_path") or "",
        "lora": asdict(LoraConfig(rank, alpha, None, **{f"train_{kind}": kind in kinds for kind in ("mlp", "attn", "unembed")})),
        "step": None,
        "slots": slots,
        "numel": end,
        "metadata": {},
        "from_peft": True,
    }


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_bytes())
    except OSError as error:
        raise ServerError(f"cannot read {file}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ServerError(f"{file} is damaged: {error}") from error
    if not isinstance(config, dict):
        raise ServerError(f"{file} is damaged: it holds no JSON object")
    return config


def _check_config(config: Mapping[str, Any]) -> None:
    """peft_type first: what the other keys mean depends on it. Keys that peft does not know yet may stand there as long as they are off."""
    for key, allowed in _ALLOWED.items():
        value = config.get(key)
        if not any(value is one or (isinstance(one, str) and value == one) for one in allowed):
            raise _refused(key, value, " or ".join(map(json.dumps, allowed)))
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise _refused("r", rank, "a whole number, 1 or more")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not abs(alpha) < FLOAT32_MAX:
        raise _refused("lora_alpha", alpha, "a finite number")
    for key in ("target_modules", "target_parameters"):
        names = config.get(key) or []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise _refused(key, names, "a list of the names (not a pattern) of what has LoRA matrices in the file")
    if any("." not in name for name in config.get("target_parameters") or []):
        raise _refused("target_parameters", config["target_parameters"], "names with their module's, as mlp.experts.down_proj")
    for key in sorted(config.keys() - _ALLOWED.keys() - _READ - _SAYS_NOTHING):
        value = config[key]
        if not (value is None or value is False or value in ({}, [])):  # 0 is a layer
            raise _refused(key, value, "null, false or empty: adapters have nothing like it here")


def _refused(key: str, value: Any, allowed: str) -> InvalidRequest:
    return InvalidRequest(f"{CONFIG}: {key} is {json.dumps(value)[:200]}; allowed is {allowed}")


def _paths(shapes: Mapping[str, tuple[int, ...]], rank: int) -> list[str]:
    """The modules that the file has an A [k * rank, in] and a B [out, k * rank] of, and nothing else. k > 1: a stack of k experts."""
    paths = []
    for name in sorted(shapes):
        end = next((end for end in (LORA_A, LORA_B) if name.endswith(end)), None)
        if end is None or not name.startswith(PREFIX):
            what = (
                "a copy of the base model's own weights: save it again with save_pretrained(..., save_embedding_layers=False)"
                if name.endswith(".base_layer.weight")
                else f"not a LoRA matrix: allowed are {PREFIX}<module>{LORA_A} and {LORA_B}"
            )
            raise InvalidRequest(f"{WEIGHTS} holds {name}, {what}")
        path = name[len(PREFIX) : -len(end)]
        twin = f"{PREFIX}{path}{LORA_B if end == LORA_A else LORA_A}"
        if twin not in shapes:
            raise InvalidRequest(f"{WEIGHTS} lacks {twin}: it holds only {name}")
        shape = shapes[name]
        width = shape[0 if end == LORA_A else 1] if len(shape) == 2 else 0
        if width == 0 or width % rank:
            raise InvalidRequest(f"{WEIGHTS}: {name} has shape {list(shape)}, which is none of rank {rank} (r in {CONFIG})")
        if end == LORA_A:
            paths.append(path)
    if not paths:
        raise InvalidRequest(f"{WEIGHTS} holds no LoRA matrix")
    return paths


def _check_targets(config: Mapping[str, Any], paths: list[str]) -> None:
    """Names and matrices tell the same: peft would pass over a matrix that no name selects, and start afresh where one is missing."""
    owners = {name: name for name in config.get("target_modules") or []}
    owners |= {name: name.rpartition(".")[0] for name in config.get("target_parameters") or []}  # of a parameter, its module
    selected = set()
    for path in paths:
        parts = path.replace(".base_layer", "").split(".")  # where PEFT puts the first of a module's two parameters
        found = {".".join(parts[i:]) for i in range(len(parts))} & set(owners.values())
        if not found:
            raise InvalidRequest(f"{WEIGHTS} holds matrices of {path}, which target_modules and target_parameters in {CONFIG} do not name")
        selected |= found
    for name, owner in owners.items():
        if owner not in selected:
            raise InvalidRequest(f"{WEIGHTS} lacks matrices of {name}, which target_modules or target_parameters in {CONFIG} name")
