"""The README's Python is run as it stands; only the port is another."""

from __future__ import annotations

import dataclasses
import re
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM
from typer.main import get_command

from spindle import cli
from spindle.server import ServerSettings
from tests.tiny import tiny_llama
from tests.tokenizer import byte_tokenizer

README = Path(__file__).parent.parent / "README.md"
TEXT = README.read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.S | re.M)
NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.fixture
def model_here(tmp_path, monkeypatch):
    """A tiny model that the README's name leads to."""
    monkeypatch.chdir(tmp_path)
    tiny_llama(save=tmp_path / NAME)
    byte_tokenizer(save=tmp_path / NAME)
    return tmp_path


def test_there_are_two_blocks():
    assert ["import spindle" in block for block in BLOCKS] == [True, False]


def test_what_is_named_is_there():
    root = README.parent
    serve = {option for parameter in get_command(cli.app).commands["serve"].params for option in parameter.opts}
    prose = re.sub(r"^```.*?^```", "", TEXT, flags=re.S | re.M)
    # --model is of `spindle demo`, --name and the others of `spindle serve`
    assert set(re.findall(r"(--[a-z][a-z-]+)", prose)) - {"--help", "--model"} <= serve
    assert {path.stem.removeprefix("test_") for path in (root / "benches").glob("test_*.py")} == set(re.findall(r"NAME=(\w+)", TEXT))
    targets = "\n".join(path.read_text() for path in (root / "Makefile", *(root / "mk").glob("*.mk")))
    assert all(re.search(rf"^{target}:", targets, re.M) for target in re.findall(r"(?:^|`)make (\w+)", TEXT, re.M))
    assert all((root / path).exists() for path in re.findall(r"`([\w./]+/[\w.]*)`", TEXT))
    assert "max_receiving_bytes" in {field.name for field in dataclasses.fields(ServerSettings)}


def test_in_process(model_here, capsys):
    exec(compile(BLOCKS[0], "README", "exec"), {"__name__": "readme"})
    losses = [float(loss) for loss in re.findall(r"^([\d.]+) \[", capsys.readouterr().out, re.M)]
    assert len(losses) == 5 and losses[-1] < losses[0]
    assert {"adapter_model.safetensors", "adapter_config.json"} <= {path.name for path in (model_here / "my-adapter").iterdir()}
    merged, base = (AutoModelForCausalLM.from_pretrained(model_here / name).state_dict() for name in ("my-model", NAME))
    assert merged.keys() == base.keys() and any((merged[key] != base[key]).any() for key in base)


def test_with_the_sdk_against_spindle_serve(model_here, capsys):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "spindle.cli", "serve", NAME, "--name", NAME, "--port", str(port), "--store", "store"]
    process = subprocess.Popen([*command, "--api-key", "tml-my-key"], stderr=subprocess.PIPE, text=True)
    try:
        for _ in range(900):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/healthz", timeout=2)
                break
            except OSError:
                assert process.poll() is None, process.stderr.read()
                time.sleep(0.1)
        block = BLOCKS[1].replace("127.0.0.1:8000", f"127.0.0.1:{port}")
        exec(compile(block, "README", "exec"), {"__name__": "readme"})
    finally:
        process.terminate()
        process.wait(30)
        process.stderr.close()
    losses = [float(loss) for loss in re.findall(r"^([\d.]+) \{", capsys.readouterr().out, re.M)]
    assert len(losses) == 5 and losses[-1] < losses[0]
