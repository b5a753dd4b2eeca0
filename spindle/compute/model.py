"""A base model from transformers, frozen, with its linear layers open to many adapters at once."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from spindle.compute.attention import ATTENTION, Packing
from spindle.compute.experts import EXPERTS, open_experts
from spindle.compute.head import Head
from spindle.compute.layout import AdapterLayout, LoraTarget, build_layout, kind_of
from spindle.compute.lora import LoraLinear, Route, Router, RowGroup
from spindle.compute.source import ALLOWED, locate_model
from spindle.errors import UserError
from spindle.types import LoraConfig

__all__ = ["BaseModel", "load_tokenizer"]

_LAYER = re.compile(r"\blayers\.(\d+)\.")
_ROUTERS = {"gate", "router", "shared_expert_gate"}  # linear maps that choose experts: never adapted


def _from_pretrained(auto: Any, path: str, **options: Any) -> Any:
    """``auto.from_pretrained`` of what ``locate_model`` found. Raises UserError for a name that the hub does not give either."""
    try:
        return auto.from_pretrained(path, **options)
    except OSError as error:
        if Path(path).is_dir():
            raise
        reason = str(error).partition("\n")[0].rstrip(".")
        raise UserError(f"model {path!r}: no such directory here, and loading it from the hub failed: {reason}; give {ALLOWED}") from error


def load_tokenizer(source: str | os.PathLike[str]) -> Any:
    """The transformers tokenizer that belongs to a model source (directory, GGUF file or hub name)."""
    path, extra = locate_model(source)
    return _from_pretrained(AutoTokenizer, path, **extra)


def _context(config: Any) -> int:
    """Tokens of the longest sequence. LongRoPE turns all positions of a pass by other factors once any sequence of it is longer than the
    model's first context: a sequence's result is its own only up to there."""
    rope = getattr(config, "rope_parameters", None) or {}
    first = rope.get("original_max_position_embeddings") if rope.get("rope_type") == "longrope" else None
    return min(config.max_position_embeddings, first or config.max_position_embeddings)


class BaseModel:
    """name: what it was loaded as. vocab_size, max_context, eos_token_ids, num_parameters: as the model's config says.

    config: the transformers text config. decoder: the transformers decoder (embeddings to last norm). head: the unembedding.

    A model may be spread over the ``devices`` of a group, a stage on each: ``layers_per_device`` decoder layers, on the first also the
    embeddings, on the last also the final norm and the unembedding. Tokens go in and adapters lie on the first, which is ``device``;
    hidden states come out and losses are computed on the last.
    """

    def __init__(self, model: PreTrainedModel, name: str) -> None:
        self.config = model.config.get_text_config()
        self.name = name
        self.model = model.eval().requires_grad_(False)
        self.decoder = model.get_decoder()
        self.device, self.dtype = model.device, model.dtype
        self.devices: tuple[torch.device, ...] = (self.device,)
        self.num_parameters = model.num_parameters()
        self.vocab_size: int = self.config.vocab_size
        self.max_context: int = _context(self.config)
        eos = getattr(model.generation_config, "eos_token_id", None)
        eos = self.config.eos_token_id if eos is None else eos
        self.eos_token_ids: tuple[int, ...] = () if eos is None else tuple(eos) if isinstance(eos, list | tuple) else (eos,)
        self.router = Router()
        self.targets = _open_to_adapters(model, self.router)
        head, path = model.get_output_embeddings(), self.targets[-1].path
        scale = getattr(self.config, "logit_scale", None) or 1.0 / (getattr(self.config, "logits_scaling", None) or 1.0)
        self._layers = [m for m in self.decoder.modules() if isinstance(m, GradientCheckpointingLayer)]
        self.layers_per_device: int = self.config.num_hidden_layers
        self._checkpointing = False
        self._entered = False  # whether ``_enter`` stands before the layers
        self.head = Head(head.weight, head.bias, path, scale, getattr(self.config, "final_logit_softcapping", None))

    @classmethod
    def load(
        cls,
        source: str | os.PathLike[str] | PreTrainedModel,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = torch.float32,
        *,
        name: str | None = None,
        check: bool = True,
    ) -> BaseModel:
        """source: a transformers decoder directory, hub name, GGUF file, or a built model (which is then changed in place).

        dtype None keeps the checkpoint's. check: compare a few tokens with transformers' own attention before anything is trained.
        Raises UserError for a source that is not there, and, naming the model type and the part, for what is not supported.
        """
        if isinstance(source, PreTrainedModel):
            model, name = source, name or source.config.name_or_path or source.config.model_type
            model.set_attn_implementation(ATTENTION)
            if dtype is not None:
                model.to(dtype)  # type: ignore[arg-type]
        else:
            path, extra = locate_model(source)
            if name is None:
                file = Path(extra.get("gguf_file", path))
                name = file.stem if extra else file.resolve().name if file.is_dir() else path.rstrip("/")
            model = _from_pretrained(AutoModelForCausalLM, path, dtype=dtype or "auto", attn_implementation=ATTENTION, **extra)
        model.to(device)  # type: ignore[arg-type]
        base = cls(model, name)
        if check:
            base.check()
        return base

    def replica(self, devices: torch.device | str | Sequence[torch.device | str], layers_per_device: int | None = None) -> BaseModel:
        """The same model for another thread: modules of its own; tensors that already are where it wants them are shared.

        devices: one, or those of a group, with ``layers_per_device`` layers on each (by default as many as spread them evenly).
        Raises UserError when the layers do not divide into as many stages as there are devices, or cannot be spread at all.
        """
        places = tuple(map(torch.device, [devices] if isinstance(devices, torch.device | str) else devices))
        per_device = layers_per_device or -(-self.config.num_hidden_layers // len(places))
        memo: dict[int, Any] = {id(self.router): Router()}
        for x, stage in self.stages(per_device, len(places)):
            moved = x.to(places[stage])
            memo[id(x)] = nn.Parameter(moved, requires_grad=False) if isinstance(x, nn.Parameter) and moved is not x else moved
        other = copy.deepcopy(self, memo)
        other.device, other.devices, other.layers_per_device = places[0], places, per_device
        head = other.model.get_output_embeddings()
        if head.weight is other.model.get_input_embeddings().weight and places[-1] != places[0]:
            # tied: a copy, for the head's products are the largest of all, and hidden states would have to travel back for them
            head.weight = nn.Parameter(head.weight.to(places[-1]), requires_grad=False)
        other.head.weight = head.weight
        other.checkpoint_activations(False)
        if len(set(places)) > 1 and not other._entered:
            other._entered = True
            for index, layer in enumerate(other._layers):
                layer.register_forward_pre_hook(partial(other._enter, index), with_kwargs=True)
        return other

    def stages(self, layers_per_device: int, count: int) -> Iterator[tuple[torch.Tensor, int]]:
        """Every parameter and buffer with the stage it belongs to. Raises UserError as ``replica`` does."""
        layers, kind = self.config.num_hidden_layers, self.config.model_type
        of_targets = self._layers_of_targets()
        if count > 1 and (len(self._layers) != layers or of_targets != sorted(of_targets)):
            raise UserError(f"model type {kind!r} cannot be spread over devices: it is more than one row of decoder layers")
        if -(-layers // layers_per_device) != count:
            raise UserError(
                f"layers_per_device: got {layers_per_device} for a group of {count} devices; {layers} layers need "
                f"{-(-layers // layers_per_device)}"
            )
        stage_of: dict[int, int] = {}

        def put(module: nn.Module, stage: int) -> None:
            stage_of.update((id(x), stage) for x in (*module.parameters(), *module.buffers()))

        put(self.model, 0)
        put(self.model.get_output_embeddings(), count - 1)
        passed = False
        for module in self.decoder.children():
            if any(part in self._layers for part in module.children()):
                passed = True
            elif passed and any(True for _ in module.parameters()):  # the final norm; rotary embeddings have none
                put(module, count - 1)
        put(self.model.get_input_embeddings(), 0)
        for index, layer in enumerate(self._layers if count > 1 else ()):
            put(layer, index // layers_per_device)
        return ((x, stage_of[id(x)]) for x in (*self.model.parameters(), *self.model.buffers()))

    def _enter(self, index: int, layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        """Before a decoder layer: hidden states move where a stage begins, what every layer gets beside them once per pass and stage."""
        stage, within = divmod(index, self.layers_per_device)
        device = self.devices[stage]
        if within == 0 and stage and device != self.devices[stage - 1]:
            args = tuple(move(x, device) if isinstance(x, torch.Tensor) else x for x in args)
        if device == self.devices[0]:
            return args, kwargs
        packing = kwargs.get("packing") or Packing([])
        return args, {name: _each(value, lambda x: packing.on(x, device)) for name, value in kwargs.items()}

    def layout(self, lora: LoraConfig) -> AdapterLayout:
        """Where the LoRA matrices of such an adapter lie in its flat buffers."""
        layers = self._layers_of_targets()
        cuts = [sum(layer < stage * self.layers_per_device for layer in layers) for stage in range(1, len(self.devices))]
        return build_layout(lora, self.targets, cuts)

    def _layers_of_targets(self) -> list[int]:
        """The decoder layer of every target; the number of layers for the unembedding."""
        return [int(found[1]) if (found := _LAYER.search(t.path)) else self.config.num_hidden_layers for t in self.targets]

    def route(self, groups: Sequence[RowGroup | tuple]) -> Route:
        """groups: disjoint row ranges in order with the adapter of each, as ``hidden`` takes them."""
        return Route(groups, self.devices)

    @contextmanager
    def _routed(self, route: Route | None) -> Iterator[None]:
        before, self.router.route = self.router.route, route
        try:
            yield
        finally:
            self.router.route = before

    @property
    def activation_bytes(self) -> int:
        """About what a forward pass keeps per token for its backward, all layers together (attention's own workspace aside)."""
        width = sum(t.out_features + t.in_features for t in self.targets if t.kind != "unembed" and t.experts == 1)
        width += sum(self.config.num_experts_per_tok * (t.out_features + 2 * t.in_features) for t in self.targets if t.experts > 1)
        return (width + 4 * self.config.num_hidden_layers * self.config.hidden_size) * self.dtype.itemsize

    def checkpoint_activations(self, on: bool) -> None:
        """From now on keep only each layer's input for the backward and compute the rest again (or do not). Same bits either way."""
        if on == self._checkpointing:
            return
        if not self._layers:
            raise UserError(f"model type {self.config.model_type!r} cannot checkpoint activations")
        if on:
            contexts = {"context_fn": lambda: (nullcontext(), self._routed(self.router.route))}
            kwargs = {"use_reentrant": False, "preserve_rng_state": False, **contexts}
            enable = getattr(self.model, "activation_checkpointing_enable", None) or self.model.gradient_checkpointing_enable
            enable(kwargs)
        for layer in self._layers:
            layer.gradient_checkpointing = layer.training = on  # the flag of the layer alone: its dropouts stay off
        self._checkpointing = on

    def hidden(
        self, tokens: torch.Tensor, positions: torch.Tensor, packing: Packing, groups: Sequence[RowGroup | tuple] | Route = ()
    ) -> torch.Tensor:
        """tokens, positions [T] int64 on the model's device -> last hidden states [T, H] after the final norm, on the last device.

        groups: disjoint row ranges in order with the adapter of each (RowGroup or the tuple of its first three fields); rows that no
        group names run the bare model. When a group has ``grad``, the result carries a graph whose backward writes it (Route.finish
        then clears the rest of it).
        """
        with self._routed(groups if isinstance(groups, Route) else self.route(groups)):
            out = self.decoder(input_ids=tokens[None], position_ids=positions[None], use_cache=False, packing=packing)
        return out.last_hidden_state.squeeze(0)

    def logits(self, hidden: torch.Tensor, groups: Sequence[RowGroup | tuple] = ()) -> torch.Tensor:
        """hidden [n, H], groups over those n rows -> float32 logits [n, V]. For sampling: no gradient."""
        return self.head.logits(hidden, self.route(groups).updates(self.head.path))

    @torch.no_grad()
    def check(self) -> None:
        """Two short sequences, packed, against transformers' own attention and head; raises UserError when they differ."""
        kind, n = self.config.model_type, min(12, self.max_context)
        tokens = torch.arange(2 * n, device=self.device).remainder(self.vocab_size)
        positions = torch.arange(n, device=self.device).repeat(2)
        packing = Packing([n, n])
        try:
            ours = torch.log_softmax(self.logits(self.hidden(tokens, positions, packing)), -1)
        except RuntimeError as problem:
            if len(self.devices) == 1 or isinstance(problem, torch.OutOfMemoryError):
                raise
            raise UserError(f"model type {kind!r} cannot be spread over devices: {str(problem).splitlines()[0]}") from problem
        if packing.calls != self.config.num_hidden_layers:
            raise UserError(
                f"model type {kind!r} is not supported: {packing.calls} of its {self.config.num_hidden_layers} layers use the attention "
                "interface; layers of another kind would see across packed sequences"
            )
        experts = any(t.parameter for t in self.targets)
        self.model.set_attn_implementation("eager")
        if experts:
            self.model.set_experts_implementation("eager")
        try:
            theirs = [self.model(input_ids=t[None], use_cache=False).logits[0] for t in tokens.split(n)]
        finally:
            self.model.set_attn_implementation(ATTENTION)
            if experts:
                self.model.set_experts_implementation(EXPERTS)
        error = (ours - torch.log_softmax(torch.cat(theirs).float(), -1)).abs().max().item()
        if not error <= (1e-3 if self.dtype == torch.float32 else 0.5):
            raise UserError(f"model type {kind!r} is not supported: packed logprobs differ from transformers' by {error:.3g}")


def move(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Hidden states over the border of two stages; in the backward, autograd brings their gradient the other way."""
    return x.to(device)


def _each(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``value`` with every tensor in it changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple | list):
        return type(value)(_each(x, change) for x in value)
    return {key: _each(x, change) for key, x in value.items()} if isinstance(value, dict) else value


def _open_to_adapters(model: PreTrainedModel, router: Router) -> list[LoraTarget]:
    """Replace the linear layers inside decoder layers; say which LoRA targets there are, in the order of the model, unembedding last."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise UserError(f"model type {model.config.model_type!r} is not supported: its unembedding is {type(head).__name__}, not nn.Linear")
    targets = []
    for path, module in list(model.named_modules()):
        targets += open_experts(module, path, router)
        leaf = path.rpartition(".")[2]
        if not isinstance(module, nn.Linear) or module is head or ".layers." not in f".{path}" or leaf in _ROUTERS:
            continue
        targets.append(LoraTarget(path, module.in_features, module.out_features, kind_of(path)))
        model.set_submodule(path, LoraLinear(module, path, router))
    if not any(t.kind == "attn" for t in targets):
        raise UserError(f"model type {model.config.model_type!r} is not supported: no nn.Linear found in its attention layers")
    if any(t.parameter for t in targets):
        model.set_experts_implementation(EXPERTS)
    path = next(name for name, module in model.named_modules() if module is head)
    return [*targets, LoraTarget(path, head.in_features, head.out_features, "unembed")]
