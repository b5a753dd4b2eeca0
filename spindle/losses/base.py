"""What a loss is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

__all__ = ["Config", "Inputs", "Loss"]

Config = Mapping[str, float | str]
Inputs = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Loss:
    """fn(p, inputs, config, sequences) -> loss per cell; see the package docstring.

    required: inputs every datum must bring, beside target_tokens. optional: inputs with the value that an absent one has everywhere.
    defaults: config keys. check_config raises ValueError with a text that begins with the key. whole_segment: fn must see all cells of
    a request's part at once (it relates cells to one another). metrics: further figures, each a mean over datums, from the same
    arguments without gradient. needs_spans: every datum must carry provenance spans.
    """

    name: str
    fn: Callable[[torch.Tensor, Inputs, Config, np.ndarray], torch.Tensor]
    required: tuple[str, ...] = ()
    optional: Mapping[str, float] = field(default_factory=dict)
    defaults: Mapping[str, float | str] = field(default_factory=dict)
    check_config: Callable[[Config], None] | None = None
    whole_segment: bool = False
    metrics: Callable[[torch.Tensor, Inputs, Config, np.ndarray], dict[str, float]] | None = None
    needs_spans: bool = False
