"""The C++ parts by themselves: a fixed number of fuzz inputs under sanitizers, the refusal of big-endian machines, cppcheck."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from spindle import codec

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
CXX = os.environ.get("CXX", "c++").split()[0]
needs_compiler = pytest.mark.skipif(shutil.which(CXX) is None or not CSRC.exists(), reason="no C++ compiler or no sources here")
plain_build = pytest.mark.skipif("SPINDLE_SANITIZED" in os.environ, reason="this run is itself under a sanitizer")


@needs_compiler
@plain_build
@pytest.mark.timeout(600)
def test_fixed_seed_of_the_fuzz_target(tmp_path):
    flags = subprocess.run(["pkg-config", "--cflags", "--libs", "libzstd"], check=True, capture_output=True, text=True).stdout.split()
    sources = [*sorted(CSRC.glob("*.cpp")), ROOT / "fuzz/target.cpp", ROOT / "fuzz/driver.cpp"]
    command = [CXX, "-std=c++17", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", f"-I{CSRC}"]
    driver = tmp_path / "driver"
    subprocess.run([*command, *(str(path) for path in sources if path.name != "bindings.cpp"), *flags, "-o", str(driver)], check=True)
    corpus = sorted(str(path) for path in (ROOT / "fuzz/corpus").iterdir())
    assert len(corpus) >= 14
    done = subprocess.run([str(driver), "5000", "1", *corpus], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == f"{5000 + len(corpus)} inputs"


@needs_compiler
@plain_build
def test_big_endian_machines_are_refused_at_build_time():
    command = [
        CXX,
        "-std=c++17",
        "-fsyntax-only",
        "-x",
        "c++",
        "-U__BYTE_ORDER__",
        "-D__BYTE_ORDER__=__ORDER_BIG_ENDIAN__",
        str(CSRC / "bytes.hpp"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0 and "it does not run on big-endian machines" in done.stderr


@plain_build
@pytest.mark.skipif(shutil.which("cppcheck") is None, reason="cppcheck is not installed")
def test_cppcheck_finds_nothing():
    options = ["--enable=warning,performance,portability", "--std=c++17", "--error-exitcode=1", "--inline-suppr", "-q"]
    command = ["cppcheck", *options, "--suppress=missingIncludeSystem", f"-I{CSRC}", str(CSRC), str(ROOT / "fuzz")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_file_of_csrc_is_in_its_readme():
    readme = (CSRC / "README.md").read_text()
    for path in CSRC.iterdir():
        if path.suffix in {".cpp", ".hpp"}:
            assert f"`{path.name}`" in readme or f"`{path.stem}`" in readme, path.name


def test_the_extension_under_test_is_this_trees():
    assert Path(codec._codec.__file__).is_relative_to(ROOT)
