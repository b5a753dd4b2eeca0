"""Micro-batches from plain lists, and the oracle: transformers + peft in float64."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import numpy as np
import peft
import torch

from spindle import losses
from spindle.compute.adapter import Adapter
from spindle.compute.batch import MicroBatch, Segment
from spindle.compute.model import BaseModel
from spindle.types import LoraConfig


@dataclass
class Item:
    """One sequence: tokens [n], targets [n] or [n, k], float inputs of the targets' shape."""

    tokens: np.ndarray
    targets: np.ndarray
    inputs: dict[str, np.ndarray] = field(default_factory=dict)


@dataclass
class Request:
    adapter: Adapter
    items: list[Item]
    loss_fn: str = "cross_entropy"
    config: dict = field(default_factory=dict)
    backward: bool = True


def random_item(rng: np.random.Generator, n: int, k: int = 0, vocab: int = 2048, names: tuple[str, ...] = ("weights",)) -> Item:
    shape = (n, k) if k else (n,)
    return Item(
        rng.integers(0, vocab, n), rng.integers(0, vocab, shape), {name: rng.normal(size=shape).astype(np.float32) for name in names}
    )


def pack(requests: list[Request]) -> MicroBatch:
    """All requests in one micro-batch, a segment each."""
    tokens, targets, lengths, widths, segments = [], [], [], [], []
    rows = cells = seqs = 0
    for r in requests:
        loss = losses.get(r.loss_fn, r.config)
        inputs = {}
        for name in (*loss.required, *loss.optional, *loss.supplied):
            if name in loss.optional and not any(name in i.inputs for i in r.items):
                values = [np.full(i.targets.size, loss.optional[name]) for i in r.items]
            else:
                values = [np.asarray(i.inputs[name]).reshape(-1) for i in r.items]
            inputs[name] = torch.from_numpy(np.concatenate(values).astype(np.float32))
        n, c = sum(len(i.tokens) for i in r.items), sum(i.targets.size for i in r.items)
        segments.append(
            Segment(
                r.adapter,
                r.loss_fn,
                {**loss.defaults, **r.config},
                r.backward,
                slice(seqs, seqs + len(r.items)),
                slice(rows, rows + n),
                slice(cells, cells + c),
                inputs,
            )
        )
        rows, cells, seqs = rows + n, cells + c, seqs + len(r.items)
        for i in r.items:
            tokens.append(i.tokens)
            targets.append(i.targets.reshape(-1))
            lengths.append(len(i.tokens))
            widths.append(i.targets.shape[1] if i.targets.ndim == 2 else 0)
    cat = lambda xs, dtype: torch.from_numpy(np.concatenate(xs).astype(dtype))  # noqa: E731
    return MicroBatch(cat(tokens, np.int32), cat(targets, np.int64), np.array(lengths), np.array(widths), segments)


def random_adapter(base: BaseModel, lora: LoraConfig, seed: int = 0) -> Adapter:
    """An adapter whose B is not zero."""
    adapter = Adapter(base.layout(lora)).init(seed)
    generator = torch.Generator().manual_seed(seed + 1)
    for _, b in adapter.weights().matrices.values():
        b.normal_(0.0, 0.05, generator=generator)
    return adapter


class Oracle:
    """A peft model in float64 with the adapter's weights. ``model`` must be untouched by BaseModel.load."""

    def __init__(self, model, adapter: Adapter, dtype: torch.dtype = torch.float64) -> None:
        layout = adapter.layout
        config = peft.LoraConfig(
            r=layout.lora.rank,
            lora_alpha=layout.lora.alpha,
            target_modules=list(layout.target_modules),
            target_parameters=list(layout.target_parameters) or None,
            lora_dropout=0.0,
        )
        model = copy.deepcopy(model).to(dtype)
        if hasattr(model.config, "num_experts"):
            model.set_experts_implementation("eager")  # the grouped kernels know no float64
        self.model = peft.get_peft_model(model, config)
        self.slots = {s.name: s for s in layout.slots}
        own = dict(self.model.named_parameters())
        self.params = {name: own[name.replace(".weight", ".default.weight")] for name in self.slots}
        with torch.no_grad():
            for name, s in self.slots.items():
                self.params[name].copy_(adapter.params[s.offset : s.offset + s.numel].view(s.shape))

    def logprobs(self, item: Item) -> torch.Tensor:
        """Logprobs of the item's targets, in their shape."""
        logits = self.model(input_ids=torch.from_numpy(item.tokens)[None], use_cache=False).logits[0]
        targets = torch.from_numpy(item.targets)
        flat = targets if targets.dim() == 2 else targets[:, None]
        return torch.log_softmax(logits, -1).gather(1, flat).view(targets.shape)

    def grads(self) -> dict[str, torch.Tensor]:
        return {name: p.grad for name, p in self.params.items()}

    def assert_grads(self, flat: torch.Tensor, rtol: float = 1e-5) -> None:
        """Every matrix of the flat gradient against autograd's, in relative Frobenius norm."""
        for name, want in self.grads().items():
            s = self.slots[name]
            got = flat[s.offset : s.offset + s.numel].view(s.shape).double()
            error = (got - want).norm() / want.norm().clamp_min(1e-12)
            assert error <= rtol, f"{name}: relative error {error:.2e}"
