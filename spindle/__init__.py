"""Spindle: a LoRA training engine inside one Python process, speaking the Tinker wire format."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from spindle import errors
from spindle.types import (
    AdamParams,
    Datum,
    DimuonParams,
    ForwardBackwardOutput,
    LoraConfig,
    OptimStepOutput,
    SampledSequence,
    SampleOutput,
    SamplingParams,
    TensorData,
)

if TYPE_CHECKING:
    from spindle.engine import Engine
    from spindle.future import Future
    from spindle.handle import AdapterHandle
    from spindle.scheduler import SchedulerConfig

__version__ = "0.1.0"

_LAZY = {  # these import torch or the extension: a frontend that only forwards bodies needs neither
    "AdapterHandle": "spindle.handle",
    "Engine": "spindle.engine",
    "Future": "spindle.future",
    "SchedulerConfig": "spindle.scheduler",
}

__all__ = [
    "AdamParams",
    "AdapterHandle",
    "Datum",
    "DimuonParams",
    "Engine",
    "ForwardBackwardOutput",
    "Future",
    "LoraConfig",
    "OptimStepOutput",
    "SampleOutput",
    "SampledSequence",
    "SamplingParams",
    "SchedulerConfig",
    "TensorData",
    "errors",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'spindle' has no attribute {name!r}")
