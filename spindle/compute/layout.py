"""Where each LoRA matrix lies in an adapter's flat buffer. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from spindle.types import LoraConfig

__all__ = ["LORA_A", "LORA_B", "PREFIX", "AdapterLayout", "LoraTarget", "TensorSlot", "build_layout", "kind_of"]

PREFIX, LORA_A, LORA_B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
_ALIGN = 16  # floats: every matrix starts on a 64-byte border, so that kernels take the same path for every adapter


@dataclass(frozen=True)
class LoraTarget:
    """A linear map that LoRA can adapt. kind: ``attn``, ``mlp`` or ``unembed``. experts > 1: a stack of that many maps.

    path: the name PEFT gives it, e.g. ``model.layers.0.self_attn.q_proj``. parameter: for experts, the 3-D parameter's own name.
    """

    path: str
    in_features: int
    out_features: int
    kind: str
    experts: int = 1
    parameter: str | None = None


def kind_of(path: str) -> str:
    """The kind of the linear map at ``path``: ``unembed`` when it lies in no layer."""
    if ".layers." not in f".{path}":
        return "unembed"
    parent = path.rpartition(".")[0]
    return "attn" if "attn" in parent or "attention" in parent else "mlp"


@dataclass(frozen=True)
class TensorSlot:
    """name: PEFT state-dict key. The tensor is ``flat[offset : offset + prod(shape)]``, row-major."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        n = 1
        for d in self.shape:
            n *= d
        return n


@dataclass(frozen=True)
class AdapterLayout:
    """slots come in pairs: A [rank, in], then B [out, rank] of each target. numel counts the padding between slots (always 0 there)."""

    lora: LoraConfig
    slots: tuple[TensorSlot, ...]
    numel: int
    target_modules: tuple[str, ...]  # for adapter_config.json
    target_parameters: tuple[str, ...] = ()  # expert stacks, for adapter_config.json
    cuts: tuple[int, ...] = ()  # of a model spread over stages: the first slot of every stage but the first

    @property
    def scale(self) -> float:
        return self.lora.alpha / self.lora.rank

    @cached_property
    def pairs(self) -> dict[str, tuple[TensorSlot, TensorSlot]]:
        """Target path -> (A, B)."""
        return {a.name[len(PREFIX) : -len(LORA_A)]: (a, b) for a, b in zip(self.slots[::2], self.slots[1::2], strict=True)}

    @cached_property
    def parts(self) -> tuple[tuple[int, AdapterLayout], ...]:
        """Per stage: where its slots start in the flat buffer, and a layout of them alone."""
        if not self.cuts:
            return ((0, self),)
        borders = [0, *self.cuts, len(self.slots)]
        starts = [self.slots[i].offset if i < len(self.slots) else self.numel for i in borders]
        return tuple(
            (start, replace(self, slots=tuple(replace(s, offset=s.offset - start) for s in self.slots[i:j]), numel=stop - start, cuts=()))
            for i, j, start, stop in zip(borders, borders[1:], starts, starts[1:], strict=False)
        )

    @cached_property
    def gaps(self) -> list[tuple[int, int]]:
        """Ranges of the flat buffer that belong to no slot."""
        ends = [s.offset + s.numel for s in self.slots]
        starts = [*(s.offset for s in self.slots[1:]), self.numel]
        return [(end, start) for end, start in zip(ends, starts, strict=True) if end < start]


def build_layout(lora: LoraConfig, targets: Sequence[LoraTarget], cuts: Sequence[int] = ()) -> AdapterLayout:
    """The layout of an adapter that trains those ``targets`` its three flags ask for.

    cuts: of a model spread over stages, how many targets lie before every stage but the first.
    """
    wanted = {"attn": lora.train_attn, "mlp": lora.train_mlp, "unembed": lora.train_unembed}
    slots: list[TensorSlot] = []
    offset = 0
    chosen = [t for t in targets if wanted[t.kind]]
    for t in chosen:
        for suffix, shape in ((LORA_A, (lora.rank * t.experts, t.in_features)), (LORA_B, (t.out_features, lora.rank * t.experts))):
            slots.append(TensorSlot(f"{PREFIX}{t.path}{suffix}", shape, offset))
            offset += -(-shape[0] * shape[1] // _ALIGN) * _ALIGN
    modules = _unique(t.path.rsplit(".", 1)[-1] for t in chosen if t.parameter is None)
    parameters = _unique(t.parameter for t in chosen if t.parameter is not None)
    slots_before = tuple(2 * sum(wanted[t.kind] for t in targets[:cut]) for cut in cuts)
    return AdapterLayout(lora, tuple(slots), offset, modules, parameters, slots_before)


def _unique(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
