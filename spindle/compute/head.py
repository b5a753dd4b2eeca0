"""The unembedding: logits for sampling, and logprobs with their gradient in row chunks, so that logits never exist whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from spindle.compute.lora import RowGroup, window

__all__ = ["Head"]


class Head:
    """weight [V, H], bias [V] or None, path: its LoRA target name; logits are scale * (W h + b), then softcap * tanh(. / softcap)."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, path: str, scale: float = 1.0, softcap: float | None = None) -> None:
        self.weight, self.bias, self.path, self.scale, self.softcap = weight, bias, path, scale, softcap

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor, groups: Sequence[RowGroup]) -> torch.Tensor:
        """hidden [n, H], groups over these rows -> float32 [n, V]."""
        out = F.linear(hidden, self.weight, self.bias)
        for g in groups:
            pair = None if g.weights is None else g.weights.matrices.get(self.path)
            if pair is not None:
                low, high = window(g.start, g.stop, hidden.shape[0])
                z = (hidden[low:high] @ pair[0].t())[g.start - low : g.stop - low]
                out[g.start : g.stop].addmm_(z, pair[1].t(), alpha=g.weights.scale)
        out = out.float()
        if self.scale != 1.0:
            out.mul_(self.scale)
        return out if self.softcap is None else out.div_(self.softcap).tanh_().mul_(self.softcap)
