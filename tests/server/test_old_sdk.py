"""SDK 0.25 keeps working: installed beside the current one and run in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.server.conftest import NAME

VERSION = "0.25.0"


@pytest.fixture(scope="module")
def old_sdk(request):
    """A directory that holds the old SDK alone; its dependencies are those of the current one."""
    target = request.config.cache.mkdir(f"tinker-{VERSION}")
    if not (target / "tinker").is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), f"tinker=={VERSION}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if done.returncode != 0:
            pytest.skip(f"cannot install tinker {VERSION} here: {done.stderr.strip().splitlines()[-1:]}")
    return target


@pytest.mark.slow
def test_a_training_script_runs_under_the_old_sdk(old_sdk, url):
    script = Path(__file__).with_name("old_sdk.py")
    environment = os.environ | {"PYTHONPATH": str(old_sdk)}
    done = subprocess.run([sys.executable, str(script), url, NAME], env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["version"] == VERSION
    assert told["losses"][-1] < told["losses"][0]
    assert told["shape"] == [40, 5]
    assert told["same"][0] == told["same"][1]
    assert len(told["greedy"]) == 2 and told["greedy"][0] == told["greedy"][1]
    assert told["scored"][0][1:] == pytest.approx(told["scored"][1][1:], abs=1e-6)
    assert told["error"].startswith("RequestFailedError") and "loss_fn 'nothing'" in told["error"]
    assert told["model_id"] in told["runs"]
    assert httpx.get(told["archive"]).content[:2] == b"\x1f\x8b"
