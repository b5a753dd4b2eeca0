"""A base model with an adapter merged into it, as a transformers directory: W + scale * B A in the base model's dtype.

Written tensor by tensor and row block by row block, so that no second copy of the model is ever in memory. Names and shapes are those of
the model in memory, which ``AutoModelForCausalLM.from_pretrained`` reads.
"""

from __future__ import annotations

import copy
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from spindle.errors import InvalidRequest
from spindle.store.files import new_directory

__all__ = ["check_mergeable", "save_merged"]

SINGLE = "model.safetensors"
SHARD_BYTES = 4 << 30
BLOCK_ELEMENTS = 4 << 20  # merged at once
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64", torch.bool: "BOOL"}


class _Delta(NamedTuple):
    """A [experts, rank, in] and B [experts, out, rank] of one parameter, float32; experts is 1 for a plain matrix."""

    a: torch.Tensor
    b: torch.Tensor


def check_mergeable(base: Any) -> None:
    """Raises InvalidRequest for a base model whose weights are not plain floating-point numbers."""
    if getattr(base.model, "hf_quantizer", None) is not None or base.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise InvalidRequest("a merged export needs a base model that is not quantized; export the adapter alone")


def save_merged(
    path: str | os.PathLike[str], base: Any, layout: Any, params: torch.Tensor, tokenizer: Any | None = None, replace: bool = False
) -> None:
    """Write ``base`` (a BaseModel) with the adapter ``params`` [P] float32 on the CPU merged in: whole at ``path``, or not at all.

    Raises InvalidRequest when ``path`` exists and ``replace`` is false, or the base model is quantized.
    """
    check_mergeable(base)
    deltas = _deltas(base, layout, params)
    tensors = _tensors(base.model, deltas)
    with new_directory(path, replace) as directory:
        _write_configs(directory, base, untied=_head_name(base) in deltas)
        if tokenizer is not None:
            tokenizer.save_pretrained(directory)
        shards = _shards(tensors)
        names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)] if len(shards) > 1 else [SINGLE]
        for file, shard in zip(names, shards, strict=True):
            _write_shard(directory / file, shard, deltas, layout.scale)
        if len(shards) > 1:
            weight_map = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
            index = {"metadata": {"total_size": sum(map(_nbytes, tensors.values()))}, "weight_map": weight_map}
            (directory / f"{SINGLE}.index.json").write_text(json.dumps(index, indent=1) + "\n")


def _head_name(base: Any) -> str:
    return f"{base.head.path}.weight"


def _deltas(base: Any, layout: Any, params: torch.Tensor) -> dict[str, _Delta]:
    """By the parameter's name in the model."""
    deltas = {}
    for target in base.targets:
        if target.path not in layout.pairs:
            continue
        a, b = (params[slot.offset : slot.offset + slot.numel].view(slot.shape) for slot in layout.pairs[target.path])
        if target.parameter is None:
            name = f"{target.path}.weight"
        else:  # A lies expert by expert; in B the expert index runs fastest
            name = f"{target.path.removesuffix('.base_layer')}.{target.parameter.rpartition('.')[2]}"
        count = target.experts
        deltas[name] = _Delta(a.view(count, -1, a.shape[1]), b.view(b.shape[0], -1, count).permute(2, 0, 1))
    return deltas


def _tensors(model: Any, deltas: dict[str, _Delta]) -> dict[str, torch.Tensor]:
    """What is written, by name. A tensor that several names share is written once, unless an adapter makes one of them differ."""
    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict().items():
        if name not in deltas:
            if tensor.data_ptr() in seen:
                continue
            seen.add(tensor.data_ptr())
        tensors[name] = tensor
    return tensors


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _shards(tensors: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + _nbytes(tensor) > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += _nbytes(tensor)
    return shards


def _write_shard(path: Path, shard: dict[str, torch.Tensor], deltas: dict[str, _Delta], scale: float) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in shard.items():
        if tensor.dtype not in _DTYPES:
            raise InvalidRequest(f"a merged export is not possible: {name} is of type {tensor.dtype}")
        start, end = end, end + _nbytes(tensor)
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, tensor in shard.items():
            for block in _merged(tensor.detach(), deltas.get(name), scale):
                file.write(block.contiguous().view(-1).view(torch.uint8).numpy().data)


def _merged(tensor: torch.Tensor, delta: _Delta | None, scale: float) -> Iterator[torch.Tensor]:
    """The tensor in row-major order, in blocks on the CPU."""
    if tensor.dim() == 0:
        yield tensor.cpu().view(1)
        return
    matrices = tensor.view(-1, *tensor.shape[-2:]) if tensor.dim() > 2 else tensor[None]
    step = max(1, BLOCK_ELEMENTS // max(1, tensor.shape[-1] if tensor.dim() > 1 else 1))
    for index, matrix in enumerate(matrices):
        for start in range(0, matrix.shape[0], step):
            rows = matrix[start : start + step]
            if delta is None:
                yield rows.cpu()
            else:
                wide = rows.to("cpu", torch.float32, copy=True)
                yield wide.addmm_(delta.b[index, start : start + step], delta.a[index], alpha=scale).to(tensor.dtype)


def _write_configs(directory: Path, base: Any, untied: bool) -> None:
    config = copy.deepcopy(base.model.config)
    config.architectures = [type(base.model).__name__]
    config.dtype = base.dtype
    if untied:  # the adapter changes the unembedding and not the embedding
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
    config.save_pretrained(directory)
    if base.model.can_generate():
        base.model.generation_config.save_pretrained(directory)
