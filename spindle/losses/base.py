"""What a loss is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

__all__ = ["Config", "Inputs", "Loss", "Sequences"]

Config = Mapping[str, Any]  # float | str values
Inputs = Mapping[str, torch.Tensor]


class Sequences(NamedTuple):
    """The datums that the cells belong to. offsets: [s + 1] cell offsets. widths: [s], 0 for targets of shape [N], K for [N, K]."""

    offsets: np.ndarray
    widths: np.ndarray

    def mean(self, values: torch.Tensor, used: torch.Tensor, empty: float = 0.0) -> torch.Tensor:
        """Per datum the mean of ``values`` [cells] where ``used`` [cells] is true -> [s]; ``empty`` for a datum that uses none."""
        s = len(self.widths)
        datum = self.datum_of_cell(values.device)
        total = torch.zeros(s, dtype=values.dtype, device=values.device).index_add_(0, datum, torch.where(used, values, 0.0))
        count = torch.zeros_like(total).index_add_(0, datum, used.to(total.dtype))
        return torch.where(count > 0, total / count.clamp_min(1.0), empty)

    def datum_of_cell(self, device: torch.device) -> torch.Tensor:
        """[cells] int64."""
        return torch.from_numpy(np.repeat(np.arange(len(self.widths)), np.diff(self.offsets))).to(device)


@dataclass(frozen=True)
class Loss:
    """fn(p, inputs, config, sequences) -> loss per cell (or any tensor to be summed); see the package docstring.

    required: inputs every datum must bring, beside target_tokens. optional: inputs with the value that an absent one has everywhere.
    supplied: inputs that the engine adds from its own records (the client cannot send them). defaults: config keys.
    check_config raises ValueError with a text that begins with the key. whole_segment: fn relates cells to one another, so it must see
    all of a request's cells in the micro-batch at once. metrics: further figures, ``name:mean`` being a mean over datums.
    needs_spans: every datum must carry provenance spans. ranks: rank of each input that is not of target_tokens' shape by rule; such an
    input comes laid beside the cells (``codec.spread_input``). check_work(lengths [D], target_widths [D], input name -> widths [D]) raises
    InvalidRequest when a request of these sizes would cost too much; it may take a while, and is called before any part of it runs.
    An optional input ``weights`` must multiply the cell's loss: cells where it is 0 may then be left out (``unlisted_logprobs``).
    """

    name: str
    fn: Callable[[torch.Tensor, Inputs, Config, Sequences], torch.Tensor]
    required: tuple[str, ...] = ()
    optional: Mapping[str, float] = field(default_factory=dict)
    supplied: tuple[str, ...] = ()
    defaults: Mapping[str, float | str] = field(default_factory=dict)
    check_config: Callable[[Config], None] | None = None
    whole_segment: bool = False
    metrics: Callable[[torch.Tensor, Inputs, Config, Sequences], dict[str, float]] | None = None
    needs_spans: bool = False
    ranks: Mapping[str, int] = field(default_factory=dict)
    check_work: Callable[[np.ndarray, np.ndarray, Mapping[str, np.ndarray]], None] | None = None
