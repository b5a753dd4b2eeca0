"""The build says what it lacks; names, versions and stubs agree; a bench run ends with one line of JSON."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import spindle

ROOT = Path(__file__).parent.parent
COMMANDS = {
    "apt-get": "apt-get install -y g++ pkg-config libzstd-dev python3-dev",
    "dnf": "dnf install -y gcc-c++ pkgconf-pkg-config libzstd-devel python3-devel",
    "apk": "apk add g++ pkgconf zstd-dev python3-dev",
    "brew": "brew install pkg-config zstd",
}


def programs(directory: Path, *names: str, status: int = 0) -> Path:
    """A directory of programs that do nothing, to stand as the whole PATH."""
    directory.mkdir(exist_ok=True)
    for name in names:
        (directory / name).write_text(f"#!/bin/sh\nexit {status}\n")
        (directory / name).chmod(0o755)
    return directory


def build(path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(path / "lib"), "--build-temp", str(path / "tmp")]
    return subprocess.run(command, cwd=ROOT, env={"PATH": str(path), **env}, capture_output=True, text=True)


@pytest.mark.parametrize("manager", COMMANDS)
def test_a_missing_libzstd_stops_the_build_with_the_command(manager, tmp_path):
    programs(tmp_path / "bin", "g++", "c++", manager)
    programs(tmp_path / "bin", "pkg-config", status=1)
    done = build(tmp_path / "bin")
    command = COMMANDS[manager] if os.geteuid() == 0 or manager == "brew" else f"sudo {COMMANDS[manager]}"
    assert done.returncode == 1
    assert "Spindle cannot be built here: libzstd 1.4 or newer with its headers (pkg-config knows no libzstd) is missing." in done.stderr
    assert f"\n    {command}\n" in done.stderr


def test_a_missing_compiler_stops_the_build_with_the_command(tmp_path):
    done = build(programs(tmp_path / "bin", "apt-get"))
    assert done.returncode == 1 and "a C++17 compiler (none of $CXX, c++, g++, clang++ is on the PATH) is missing" in done.stderr
    assert COMMANDS["apt-get"] in done.stderr


def test_a_missing_pkg_config_stops_the_build(tmp_path):
    done = build(programs(tmp_path / "bin", "g++", "c++"))
    assert done.returncode == 1 and "pkg-config, by which libzstd is found is missing" in done.stderr
    assert "Install it with your system's package manager." in done.stderr


def test_the_versions_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == spindle.__version__ == importlib.metadata.version(project["name"])


def test_the_makefile_installs_the_model_the_demo_names():
    from spindle.demo.model import INSTALL

    requirement = INSTALL.split()[-1]
    assert f'--no-deps "{requirement}"' in (ROOT / "Makefile").read_text()


def test_the_stub_names_what_the_extension_has():
    from spindle.codec import _codec

    tree = ast.parse((ROOT / "spindle/codec/_codec.pyi").read_text())
    stub: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            stub.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            stub.add(node.target.id)
    assert stub - {"__all__"} == {name for name in vars(_codec) if not name.startswith("_")}


def test_what_is_typed_says_so():
    assert (ROOT / "spindle/py.typed").exists()
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["spindle"]
    assert "py.typed" in data and "**/*.pyi" in data and (ROOT / "spindle/demo/brindle_line.jsonl").exists() and "demo/*.jsonl" in data


def test_a_bench_run_ends_with_one_line_of_json(tmp_path):
    shutil.copy(ROOT / "benches/conftest.py", tmp_path)
    (tmp_path / "test_it.py").write_text(
        "import numpy as np\n"
        "def test_a(figures):\n    figures['seconds'] = np.float64(1 / 3)\n    figures['by'] = {1: [2.0, np.int64(3)]}\n"
        "def test_b(figures):\n    figures['more'] = 1\n    assert False\n"
    )
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 1
    assert json.loads(done.stdout.splitlines()[-1]) == {"seconds": 0.333333, "by": {"1": [2.0, 3]}, "more": 1}


def test_the_frontend_imports_neither_torch_nor_the_extension():
    """``import spindle`` alone stays light: a process that only forwards bodies starts in a fraction of a second."""
    code = (
        "import sys, spindle, spindle.cli; sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'spindle.codec._codec')))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
