"""The README's Python is run as it stands; only the port is another."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from tests.tiny import tiny_llama
from tests.tokenizer import byte_tokenizer

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.S | re.M)
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


def test_in_process(model_here, capsys):
    exec(compile(BLOCKS[0], "README", "exec"), {"__name__": "readme"})
    losses = [float(loss) for loss in re.findall(r"^([\d.]+) \[", capsys.readouterr().out, re.M)]
    assert len(losses) == 5 and losses[-1] < losses[0]
    assert {"adapter_model.safetensors", "adapter_config.json"} <= {path.name for path in (model_here / "my-adapter").iterdir()}


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
