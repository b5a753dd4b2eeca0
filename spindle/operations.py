"""Operations on an adapter other than forward and forward_backward. Each runs alone on its adapter, in seq_id order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spindle.types import AdamParams, DimuonParams

__all__ = ["LoadState", "Operation", "OptimStep", "Publish", "SaveState"]


@dataclass(frozen=True)
class OptimStep:
    """One optimizer step on the accumulated gradient. Result: ``OptimStepOutput``."""

    params: AdamParams | DimuonParams


@dataclass(frozen=True)
class SaveState:
    """Write the adapter to ``path`` (a directory, whole or absent; PEFT layout). Result: the path."""

    path: Path
    with_optimizer: bool = True
    replace: bool = False  # an existing checkpoint of that path; refused otherwise
    metadata: Mapping[str, Any] = field(default_factory=dict)
    merge_into: tuple[Any, Any] | None = field(default=None, repr=False)
    """(BaseModel, its tokenizer or None): write a transformers directory of that model with the adapter merged into its weights instead."""


@dataclass(frozen=True)
class LoadState:
    """Replace the adapter's weights, and its optimizer state when asked (else it starts afresh). Result: the path."""

    path: Path
    with_optimizer: bool = False


@dataclass(frozen=True)
class Publish:
    """Copy the weights as they are now into a snapshot that never changes. Result: the snapshot, for ``Engine.sample``."""

    label: str = ""


Operation = OptimStep | SaveState | LoadState | Publish
