"""Which devices hold one replica of a base model: one each, or groups over which its layers are spread."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from spindle.compute.model import BaseModel
from spindle.errors import UserError

__all__ = ["Group", "group_devices"]

Group = tuple[torch.device, ...]  # of one replica, first layers first

ROOM = 0.8  # of a device's free memory that weights may take; the rest is for adapters, activations, keys and values


def free_bytes(device: torch.device) -> float:
    """What is free on a GPU; a CPU is not asked."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else math.inf


def group_devices(
    model: BaseModel,
    devices: Sequence[torch.device],
    layers_per_device: int | None = None,
    free: Callable[[torch.device], float] = free_bytes,
) -> tuple[list[Group], int]:
    """Adjacent devices as groups of one size, and how many layers each device gets.

    layers_per_device: None for the smallest groups whose devices have room for their part of ``model``, most often of one device.
    Raises UserError for a number of layers that cannot be, for devices that are no multiple of the group, and when nothing fits.
    """
    layers = model.config.num_hidden_layers
    if layers_per_device is not None:
        if not isinstance(layers_per_device, int) or not 1 <= layers_per_device <= layers:
            raise UserError(f"layers_per_device: got {layers_per_device!r}; allowed is a whole number from 1 to {layers}, all of the model")
        size = -(-layers // layers_per_device)
        if len(devices) % size:
            raise UserError(
                f"devices: got {len(devices)} with layers_per_device {layers_per_device}; {layers} layers need groups of {size} devices, "
                f"so name a multiple of {size}, or another layers_per_device"
            )
        choices, share = [layers_per_device], 1.0
    else:
        sizes = (size for size in range(1, min(layers, len(devices)) + 1) if len(devices) % size == 0)
        choices, share = [n for size in sizes if -(-layers // (n := -(-layers // size))) == size], ROOM
    lacking = ""
    for per_device in choices:
        size = -(-layers // per_device)
        groups = [tuple(devices[i : i + size]) for i in range(0, len(devices), size)]
        lacking = _lacking(model, groups, per_device, free, share)
        if not lacking:
            return groups, per_device
    raise UserError(
        f"devices: {model.name} does not fit: {lacking}; name more devices (the layers are then spread over them), or free their memory"
    )


def _lacking(model: BaseModel, groups: Sequence[Group], layers_per_device: int, free: Callable[[torch.device], float], share: float) -> str:
    """What the device with the least room for its part of the model would need and has; "" when all fit."""
    need: dict[torch.device, dict[int, int]] = {}
    for group in groups:
        for x, stage in model.stages(layers_per_device, len(group)):
            if x.device != group[stage]:
                need.setdefault(group[stage], {})[id(x)] = x.nbytes
    worst, text = 0.0, ""
    for device, tensors in need.items():
        nbytes, room = sum(tensors.values()), share * free(device)
        if nbytes - room > worst:
            worst = nbytes - room
            text = (
                f"with {layers_per_device} of {model.config.num_hidden_layers} layers on each device, {device} would hold "
                f"{nbytes / 2**30:.1f} GiB of weights and has {room / 2**30:.1f} GiB for them"
            )
    return text
