"""What a device worker is given: one micro-batch of packed rows, and which adapter and loss each stretch belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from spindle.compute.adapter import Adapter
    from spindle.compute.buffers import Buffers
    from spindle.compute.upload import Uploaded
    from spindle.errors import UserError
    from spindle.losses import Loss


@dataclass(slots=True)
class Segment:
    """The part of one request that lies in one micro-batch: whole sequences of one adapter, one loss, one config.

    A segment is also the unit of exactness: its datums are chosen from its own request alone, in a fixed order, so that
    everything summed over them (LoRA gradients, metrics) never depends on the neighbours in the micro-batch.
    """

    adapter: Adapter
    loss_fn: str
    config: Mapping[str, float | str]  # complete: defaults are filled in by losses.check_config
    backward: bool
    seqs: slice  # into MicroBatch.lengths / widths
    rows: slice  # into MicroBatch.tokens
    cells: slice  # into MicroBatch.targets
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)  # name -> [cells of this segment (, K)] float32, filled by codec.fill
    listed: np.ndarray | None = None  # [n] int64, sorted: the only cells of this segment whose logprobs are wanted; None: all of them
    loss: Loss | None = None  # of that name; None: to be looked up
    tag: Any = None  # the engine's own; workers hand it back untouched


@dataclass(slots=True)
class MicroBatch:
    """Whole sequences laid end to end, no padding. Segments of one adapter are adjacent. Host tensors are pinned when CUDA is there.

    A cell is one asked logprob: sequence s of n tokens has n cells when its target_tokens is [n] (width 0), n * k cells, row-major,
    when it is [n, k] (width k). Cells of a row are adjacent and rows are in order, so cells of a run of rows are one run.
    """

    tokens: torch.Tensor  # [T] int32
    targets: torch.Tensor  # [C] int64
    lengths: np.ndarray  # [S] int64, tokens per sequence
    widths: np.ndarray  # [S] int64, 0 for [N] targets, K for [N, K]
    segments: list[Segment]
    buffers: Buffers | None = None  # what the host tensors are views of, when they are to be used again
    uploaded: Uploaded | None = None  # the same on the device, when they are on their way there


@dataclass(slots=True)
class SegmentResult:
    """logprobs: [cells of the segment] float32 on the host, 0 where they were not wanted.

    metrics: ``name:reduction`` -> value, ``loss:sum`` always there.

    grad: flat float32 gradient of the segment's adapter [P] on the worker's device, None when the segment asked no backward.
    error: what the loss refused about this segment (its request fails alone); then metrics are empty and grad is None.
    """

    segment: Segment
    logprobs: torch.Tensor
    metrics: dict[str, float]
    grad: torch.Tensor | None
    error: UserError | None = None
