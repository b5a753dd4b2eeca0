"""An adapter: four flat float32 buffers on one device, with a view per LoRA matrix."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from spindle.compute.layout import AdapterLayout, TensorSlot

__all__ = ["Adapter", "AdapterWeights", "view", "views"]


def view(flat: torch.Tensor, slot: TensorSlot) -> torch.Tensor:
    """The slot's matrix within ``flat`` [P]."""
    return flat.as_strided(slot.shape, (slot.shape[1], 1), flat.storage_offset() + slot.offset)


def views(flat: torch.Tensor, layout: AdapterLayout) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Target path -> (A, B), views into ``flat`` [P]."""
    return {path: (view(flat, a), view(flat, b)) for path, (a, b) in layout.pairs.items()}


class AdapterWeights:
    """What a forward pass needs of an adapter, in the compute dtype. Frozen when it is a sampler's snapshot.

    params: flat [P]. matrices: target path -> (A, B), views into params.
    """

    __slots__ = ("__weakref__", "_parts", "layout", "matrices", "params")

    def __init__(self, layout: AdapterLayout, params: torch.Tensor) -> None:
        self.layout = layout
        self.params = params
        self.matrices = views(params, layout)
        self._parts: tuple[int, Sequence[torch.device], tuple[AdapterWeights, ...]] | None = None

    @property
    def scale(self) -> float:
        return self.layout.scale

    def on(self, devices: Sequence[torch.device]) -> tuple[AdapterWeights, ...]:
        """The part of each stage of a spread model, on the stage's device: a view where ``params`` lies, else a copy of this version."""
        if len(devices) == 1:
            return (self,)
        kept = self._parts  # read once: threads of one group may share these weights
        if kept is None or kept[0] != self.params._version or kept[1] != devices:
            slices = (self.params[start : start + part.numel] for start, part in self.layout.parts)
            parts = tuple(
                AdapterWeights(part, flat.to(device)) for (_, part), flat, device in zip(self.layout.parts, slices, devices, strict=True)
            )
            self._parts = kept = self.params._version, devices, parts
        return kept[2]


class Adapter:
    """params, exp_avg, exp_avg_sq: flat float32 [P]; grads: the same, or None when nothing is accumulated; step: optimizer steps done."""

    def __init__(self, layout: AdapterLayout, device: torch.device | str = "cpu") -> None:
        self.layout = layout
        self.device = torch.device(device)
        self.params = torch.zeros(layout.numel, device=device)
        self.exp_avg = torch.zeros(layout.numel, device=device)
        self.exp_avg_sq = torch.zeros(layout.numel, device=device)
        self.grads: torch.Tensor | None = None
        self.step = 0
        self._weights: AdapterWeights | None = None
        self._copies: dict[tuple[torch.device, torch.dtype], tuple[int, AdapterWeights]] = {}

    def init(self, seed: int) -> Adapter:
        """A uniform in +-1/sqrt(in), as torch and PEFT start a linear layer; B zero. The same seed gives the same bits on any device."""
        generator = torch.Generator().manual_seed(seed)
        host = self.params.zero_() if self.device.type == "cpu" else torch.zeros(self.layout.numel)
        for a, _ in self.layout.pairs.values():
            bound = 1.0 / math.sqrt(a.shape[1])
            host[a.offset : a.offset + a.numel].uniform_(-bound, bound, generator=generator)
        if host is not self.params:
            self.params.copy_(host)
        return self

    def weights(self, dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> AdapterWeights:
        """The current parameters for a forward pass: the live buffer when dtype and device are its own, else a copy of this version."""
        if self._weights is None or self._weights.params is not self.params:
            self._weights = AdapterWeights(self.layout, self.params)
        device = self.params.device if device is None else torch.device(device)
        if dtype == torch.float32 and device == self.params.device:
            return self._weights
        version, copy = self._copies.get((device, dtype), (None, None))
        if copy is None or version != self.params._version:
            copy = AdapterWeights(self.layout, self.params.to(device, dtype))
            self._copies[device, dtype] = self.params._version, copy
        return copy

    def drop_copies(self) -> None:
        """Let go of the copies in other dtypes or on other devices: they are stale, or nobody needs them for now."""
        self._copies.clear()
        if self._weights is not None:
            self._weights._parts = None

    def snapshot(self, dtype: torch.dtype = torch.float32) -> AdapterWeights:
        """A copy of the parameters that training will not touch."""
        return AdapterWeights(self.layout, self.params.to(dtype, copy=True))

    def load(self, params: np.ndarray, optimizer: tuple[np.ndarray, np.ndarray, int] | None = None) -> None:
        """Take over parameters [P], and moments and step where given (else the optimizer starts afresh). Drops an accumulated gradient."""
        self.params.copy_(torch.from_numpy(params))
        if optimizer is None:
            self.exp_avg.zero_()
            self.exp_avg_sq.zero_()
            self.step = 0
        else:
            self.exp_avg.copy_(torch.from_numpy(optimizer[0]))
            self.exp_avg_sq.copy_(torch.from_numpy(optimizer[1]))
            self.step = optimizer[2]
        self.grads = None

    def drop_buffers(self) -> None:
        """Let the memory go: whoever calls this has the buffers elsewhere and puts them back before anyone reads them."""
        self.params = self.exp_avg = self.exp_avg_sq = torch.empty(0)
        self.grads = self._weights = None
        self.drop_copies()
