"""A flat float32 buffer as a safetensors file with one named tensor per slot, and back.

Slots that lie end to end are written straight from the buffer: the file's data section is the buffer.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import safetensors

from spindle.errors import InvalidRequest, ServerError

__all__ = ["Slot", "difference", "read_flat", "read_shapes", "write_flat"]

_WIDENED = ("F32", "F16", "BF16")  # without loss


class Slot(Protocol):
    """Where one named tensor lies in a flat buffer; ``offset`` counts elements."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def offset(self) -> int: ...


def as_float32(buffer: Any) -> np.ndarray:
    """A flat float32 array over a numpy array or CPU torch tensor, without copying when it is one already."""
    if hasattr(buffer, "detach"):
        buffer = buffer.detach().cpu().float().numpy()
    return np.ascontiguousarray(buffer, dtype="<f4").reshape(-1)


def write_flat(path: str | os.PathLike[str], slots: Iterable[Slot], buffers: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
    """Write ``{prefix + slot.name: slot's part of the buffer}`` for every ``prefix: buffer`` in ``buffers``."""
    ordered = sorted(slots, key=lambda slot: slot.offset)
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    parts: list[np.ndarray] = []
    end = 0
    for prefix, buffer in buffers.items():
        flat = as_float32(buffer)
        for slot in ordered:
            size = int(np.prod(slot.shape))
            header[prefix + slot.name] = {"dtype": "F32", "shape": list(slot.shape), "data_offsets": [end, end + 4 * size]}
            parts.append(flat[slot.offset : slot.offset + size])
            end += 4 * size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb", buffering=1 << 20) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for part in parts:
            file.write(part.data)


def read_flat(path: str | os.PathLike[str], slots: Sequence[Slot], numel: int, prefix: str = "") -> np.ndarray:
    """Read the slots' tensors into a new flat float32 array of ``numel`` elements.

    Tensors in half precision are widened. Raises InvalidRequest when the file's tensors are not exactly the slots' or may not fit
    float32, ServerError when it cannot be read.
    """
    flat = np.zeros(numel, np.float32)
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            names = {name.removeprefix(prefix) for name in file.keys() if name.startswith(prefix)}  # noqa: SIM118
            what = difference(names, {slot.name for slot in slots})
            if what is not None:
                raise InvalidRequest(f"{Path(path).name} {what}")
            for slot in slots:
                dtype = file.get_slice(prefix + slot.name).get_dtype()
                if dtype not in _WIDENED:
                    raise InvalidRequest(f"{Path(path).name}: {slot.name} is of type {dtype}; allowed are {', '.join(_WIDENED)}")
                tensor = file.get_tensor(prefix + slot.name)
                if tuple(tensor.shape) != tuple(slot.shape):
                    raise InvalidRequest(
                        f"{Path(path).name}: {slot.name} has shape {list(tensor.shape)}, this adapter needs {list(slot.shape)}"
                    )
                size = int(np.prod(slot.shape))
                flat[slot.offset : slot.offset + size] = tensor.float().numpy().reshape(-1)
    except (OSError, safetensors.SafetensorError) as error:
        raise ServerError(f"cannot read {path}: {error}") from error
    return flat


def read_shapes(path: str | os.PathLike[str]) -> dict[str, tuple[int, ...]]:
    """The file's tensors by name, without reading them. Raises ServerError when it cannot be read."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, safetensors.SafetensorError) as error:
        raise ServerError(f"cannot read {path}: {error}") from error


def difference(found: set[str], wanted: set[str]) -> str | None:
    """How a file's names differ from an adapter's, with the first of them; None when they are the same."""
    missing, extra = sorted(wanted - found), sorted(found - wanted)
    if not missing and not extra:
        return None
    what = f"lacks {missing[0]}" if missing else f"holds {extra[0]}, which this adapter does not have"
    return f"{what} ({len(missing)} missing, {len(extra)} unknown tensors)"
