"""From host to device beside compute: a micro-batch's tensors travel on a stream of their own while the one before it is computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from spindle.compute.batch import MicroBatch

__all__ = ["Uploaded", "Uploader"]


@dataclass(slots=True)
class Uploaded:
    """A micro-batch's tensors where they are read: tokens where they enter the model, targets and loss inputs where hidden states leave it.

    arrived: per device an event after its last copy; whoever reads must wait for it first (``Uploader.wait``).
    """

    tokens: torch.Tensor  # [T] int32
    targets: torch.Tensor  # [C] int64
    inputs: list[dict[str, torch.Tensor]]  # of each segment
    arrived: dict[torch.device, Any] = field(default_factory=dict)

    def on(self, device: torch.device) -> Iterator[torch.Tensor]:
        for x in (self.tokens, self.targets, *(x for inputs in self.inputs for x in inputs.values())):
            if x.device == device:
                yield x


class Uploader:
    """first, last: the devices of the model where tokens enter and hidden states leave. cuda: ``torch.cuda``, or what a test puts there.

    Devices without streams (a CPU) are read where they are.
    """

    def __init__(self, first: torch.device, last: torch.device, cuda: Any = torch.cuda, types: tuple[str, ...] = ("cuda",)) -> None:
        self.first, self.last, self.cuda = first, last, cuda
        self.streams = {device: cuda.Stream(device) for device in dict.fromkeys((first, last)) if device.type in types}

    def start(self, batch: MicroBatch) -> None:
        """Begin to copy; by any thread. Where the device has no room for it, ``run`` will copy (and knows what to do then)."""
        if not self.streams:
            return
        try:
            batch.uploaded = self._copy(batch)
        except torch.OutOfMemoryError:
            batch.uploaded = None

    def wait(self, batch: MicroBatch) -> Uploaded:
        """The tensors; what the calling thread's streams do from now on comes after the copies."""
        uploaded, batch.uploaded = batch.uploaded, None  # read once: they are freed with the pass that reads them
        if uploaded is None:
            uploaded = self._copy(batch)
        for device, event in uploaded.arrived.items():
            stream = self.cuda.current_stream(device)
            stream.wait_event(event)
            for x in uploaded.on(device):
                x.record_stream(stream)  # it was allocated for the other stream, which may not have it back before this one is done
        return uploaded

    def _copy(self, batch: MicroBatch) -> Uploaded:
        inputs = [{name: self._to(x, self.last) for name, x in s.inputs.items()} for s in batch.segments]
        uploaded = Uploaded(self._to(batch.tokens, self.first), self._to(batch.targets, self.last), inputs)
        uploaded.arrived = {device: stream.record_event() for device, stream in self.streams.items()}
        return uploaded

    def _to(self, x: torch.Tensor, device: torch.device) -> torch.Tensor:
        stream = self.streams.get(device)
        if stream is None:
            return x.to(device, non_blocking=True)
        with self.cuda.stream(stream):
            return x.to(device, non_blocking=True)
