"""Where a base model is: a transformers directory, a GGUF file or a name on the hub. Imports nothing heavy, so that a mistyped path is
told at once."""

from __future__ import annotations

import os
from pathlib import Path

from spindle.errors import UserError

__all__ = ["ALLOWED", "is_model_directory", "locate_model"]

ALLOWED = "a transformers directory, a GGUF file or a hub name"


def locate_model(source: str | os.PathLike[str]) -> tuple[str, dict[str, str]]:
    """A directory, a hub name, a GGUF file or a directory that holds just one -> arguments of ``from_pretrained``.

    Raises UserError for a file or directory without a model, and for a path that is not there, before it is sought on the hub.
    """
    path = Path(os.path.expanduser(source))
    if path.is_file():
        if path.suffix != ".gguf":
            raise UserError(f"model {str(source)!r} is a file but not .gguf; give {ALLOWED}")
        return str(path.parent), {"gguf_file": path.name}
    if path.is_dir():
        if (path / "config.json").exists():
            return str(path), {}
        if (path / "adapter_config.json").exists():
            raise UserError(
                f"model directory {str(source)!r} holds an adapter and no base model; give the model that it was trained on, and load "
                "the adapter with create_adapter(state=...)"
            )
        files = sorted(path.glob("*.gguf"))
        if len(files) != 1:
            what = f"name one file, or give {ALLOWED}" if files else f"give {ALLOWED}"
            raise UserError(f"model directory {str(source)!r} holds no config.json and {len(files)} .gguf files; {what}")
        return str(path), {"gguf_file": files[0].name}
    if _is_path(source):
        raise UserError(f"model {str(source)!r} does not exist; give {ALLOWED}")
    return str(source), {}


def _is_path(source: str | os.PathLike[str]) -> bool:
    """Whether it cannot be meant as a hub name, ``name`` or ``org/name``. A ``Path`` never is: it drops the "./" that would tell."""
    return not isinstance(source, str) or source.startswith(("/", ".", "~")) or source.endswith(".gguf") or source.count("/") > 1


def is_model_directory(path: Path) -> bool:
    """Whether it holds a whole transformers model, as ``save_merged`` writes it, and no adapter."""
    return (path / "config.json").is_file() and any(path.glob("*.safetensors")) and not any(path.glob("adapter_*"))
