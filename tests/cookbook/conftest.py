"""The cookbook in an environment of its own, against a Spindle server in this process. Asked for with ``-m cookbook`` (make cookbook)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from spindle.engine import Engine
from spindle.server import running
from tests.cookbook import data

HERE = Path(__file__).parent


def pytest_configure(config):
    config.addinivalue_line("markers", "cookbook: runs the tinker-cookbook in its own environment (make cookbook)")


def pytest_collection_modifyitems(config, items):
    if "cookbook" in (config.option.markexpr or ""):
        return
    ours = [item for item in items if item.get_closest_marker("cookbook")]
    config.hook.pytest_deselected(items=ours)
    items[:] = [item for item in items if item not in ours]


@pytest.fixture(scope="session")
def python() -> Path:
    """The interpreter that has the cookbook."""
    directory = Path(os.environ.get("SPINDLE_COOKBOOK_VENV") or Path(sys.prefix).with_name(Path(sys.prefix).name + "-cookbook"))
    reason = directory / "reason"
    if reason.exists():
        pytest.skip(f"the cookbook cannot be installed here: {reason.read_text()}")
    if not (directory / "bin" / "python").exists():
        pytest.skip("the cookbook is not installed: make cookbook")
    return directory / "bin" / "python"


@pytest.fixture(scope="session")
def root(tmp_path_factory) -> Path:
    """The directory that recipes run in: tokenizers and data sets under their hub names."""
    root = tmp_path_factory.mktemp("cookbook")
    data.write_datasets(root)
    for name in (data.MODEL, data.BASE, data.OTHER):
        data.tokenizer(root / name)
    return root


@pytest.fixture(scope="session")
def model(root):
    """The base model, as transformers has it."""
    return data.base_model(root / "model")


@pytest.fixture(scope="session")
def url(python, model, root):
    data.tokenizer(root / "model")
    with Engine(str(root / "model")) as engine:
        with running(engine, store=root / "store", name=data.MODEL, aliases=[data.BASE, data.OTHER]) as url:
            yield url


@dataclass
class Cookbook:
    """Runs recipes and reads what they logged."""

    python: Path
    root: Path
    url: str

    def process(self, *command: str, stdin: str = "", timeout: float = 600) -> str:
        """Standard output of a process that has the cookbook; the end of what it said is the failure's text."""
        own = {
            "TINKER_BASE_URL": self.url,
            "TINKER_API_KEY": "tml-cookbook-test",
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(self.root / "cache"),
            "TINKER_TELEMETRY": "0",
            "TINKER_COOKBOOK_RUNS_DIR": str(self.root / "runs"),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": "",
        }
        done = subprocess.run(
            [str(self.python), *command], input=stdin, capture_output=True, text=True, timeout=timeout, cwd=self.root, env=os.environ | own
        )
        (self.root / "last.log").write_text(done.stderr)
        assert done.returncode == 0, done.stderr[-6000:]
        return done.stdout

    def recipes(self, *runs: tuple[str, str, dict[str, Any]], timeout: float = 600) -> None:
        """Run ``(module below tinker_cookbook.recipes, directory of its log, arguments)``, one after the other."""
        commands = [
            [f"tinker_cookbook.recipes.{module}", f"log_path={self.root / log}", *(f"{key}={value}" for key, value in arguments.items())]
            for module, log, arguments in runs
        ]
        self.process(str(HERE / "scripts" / "drive.py"), stdin=json.dumps(commands), timeout=timeout)

    def script(self, name: str, *arguments: str) -> Any:
        """Run one of ``scripts/``; the JSON on the last line of what it prints."""
        return json.loads(self.process(str(HERE / "scripts" / name), *arguments).splitlines()[-1])

    def rows(self, log: str) -> list[dict[str, Any]]:
        """The metrics a run logged, one dictionary a step."""
        return [json.loads(line) for line in (self.root / log / "metrics.jsonl").read_text().splitlines()]

    def series(self, log: str, key: str) -> list[float]:
        """One metric over the steps that have it."""
        return [row[key] for row in self.rows(log) if key in row]

    def checkpoints(self, log: str) -> list[dict[str, Any]]:
        """The checkpoints a run noted."""
        return [json.loads(line) for line in (self.root / log / "checkpoints.jsonl").read_text().splitlines()]


@pytest.fixture(scope="session")
def cookbook(python, root, url) -> Cookbook:
    return Cookbook(python, root, url)
