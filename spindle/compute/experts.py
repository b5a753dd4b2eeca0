"""Mixture-of-experts layers that keep their experts as 3-D parameters: rows sorted by expert, one product per expert, LoRA per expert.

Registered with transformers' ExpertsInterface. An adapter's stack of E low-rank pairs lies as PEFT has it: A [E * rank, in], expert by
expert; B [out, rank * E], the expert index running fastest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.integrations.moe import ExpertsInterface

from spindle.compute.layout import LoraTarget
from spindle.compute.lora import Block, Route, Router, Update, adapted
from spindle.errors import UserError

__all__ = ["EXPERTS", "open_experts"]

EXPERTS = "spindle_experts"


@dataclass
class _Names:
    """What an experts module is told at load: where the route is found, and its two targets' paths."""

    router: Router
    gate_up: str
    down: str


def open_experts(module: Any, path: str, router: Router) -> list[LoraTarget]:
    """The LoRA targets of an experts module, which is told their names; [] when it is no experts module.

    Raises UserError for an expert layout that EXPERTS cannot run.
    """
    stacks: list[Any] = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
    if not all(isinstance(p, nn.Parameter) and p.dim() == 3 for p in stacks):
        return []
    if getattr(module, "is_transposed", True) or getattr(module, "has_bias", True) or not getattr(module, "is_concatenated", False):
        raise UserError(f"{type(module).__name__} is not supported: its experts are transposed, interleaved or have biases")
    names = module.spindle = _Names(router, f"{path}.base_layer", path)  # PEFT wraps the parameters in this order
    where = ".".join(path.split(".")[-2:])
    experts, two_inner, hidden = stacks[0].shape
    return [
        LoraTarget(names.gate_up, hidden, two_inner, "mlp", experts, f"{where}.gate_up_proj"),
        LoraTarget(names.down, two_inner // 2, hidden, "mlp", experts, f"{where}.down_proj"),
    ]


def _a(stack: torch.Tensor, e: int, count: int) -> torch.Tensor:
    """Expert e's A [rank, in] of ``count``."""
    rank = stack.shape[0] // count
    return stack[e * rank : (e + 1) * rank]


def _b(stack: torch.Tensor, e: int, count: int) -> torch.Tensor:
    """Expert e's B [out, rank]."""
    return stack.view(stack.shape[0], -1, count)[:, :, e]


def _blocks(stack: torch.Tensor, updates: list[Update], tokens: np.ndarray, offsets: np.ndarray) -> Iterator[Block]:
    """A block per expert that has rows. tokens [M]: the token of every sorted row, ascending within an expert; offsets [E + 1]."""
    count = stack.shape[0]
    for e in np.flatnonzero(np.diff(offsets)).tolist():
        low, high = int(offsets[e]), int(offsets[e + 1])
        mine = []
        for u in updates:
            start, stop = (low + np.searchsorted(tokens[low:high], (u.start, u.stop))).tolist()
            if start < stop:
                da, db = (None, None) if u.da is None or u.db is None else (_a(u.da, e, count), _b(u.db, e, count))
                mine.append(Update(start, stop, _a(u.a, e, count), _b(u.b, e, count), u.scale, da, db, u.written))
        yield Block(low, high, stack[e], None, mine)


def experts_forward(module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
    """hidden_states [T, H], top_k_index and top_k_weights [T, k] -> [T, H]."""
    names: _Names = module.spindle
    route = names.router.route or Route(())
    total, k = top_k_index.shape
    flat = top_k_index.reshape(-1)
    order = torch.argsort(flat, stable=True)
    offsets = np.concatenate([[0], np.cumsum(np.bincount(flat.cpu().numpy(), minlength=module.gate_up_proj.shape[0]))])
    tokens = (order // k).cpu().numpy()

    def product(x: torch.Tensor, stack: torch.Tensor, path: str) -> torch.Tensor:
        updates = route.updates(path)
        for u in updates:
            for grad in (u.da, u.db):
                if grad is not None and grad.data_ptr() not in u.written:  # not every expert will write its part
                    grad.zero_()
                    u.written.add(grad.data_ptr())
        return adapted(x, list(_blocks(stack, updates, tokens, offsets)), route)

    x = hidden_states.unsqueeze(1).expand(-1, k, -1).reshape(total * k, -1)[order]  # so that the backward adds in a fixed order
    gate, up = product(x, module.gate_up_proj, names.gate_up).chunk(2, dim=-1)
    y = product(module.act_fn(gate) * up, module.down_proj, names.down)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return (y[back].view(total, k, -1) * top_k_weights.unsqueeze(-1)).sum(1).to(hidden_states.dtype)


ExpertsInterface.register(EXPERTS, experts_forward)
