"""Makes the virtual environment of the cookbook's tests: ``python tests/cookbook/environment.py DIRECTORY``.

It holds the cookbook and its light dependencies alone; torch, transformers and the SDK are the project's own, reached through a path file,
so nothing heavy is installed twice. ``tml-renderers`` is left out: the pinned version is not published, and only Inkling models need it.
When something cannot be installed the reason goes to DIRECTORY/reason, where the tests find what to say when they skip.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

COOKBOOK = "tinker-cookbook==0.6.1"
# Imported by the cookbook and not by Spindle. Installed without their own dependencies, which are here or in the project's environment.
LIGHT = [
    "antlr4-python3-runtime==4.13.2",
    "blobfile",
    "chz",
    "cloudpickle",
    "datasets",
    "dill",
    "latex2sympy2-extended",
    "lxml",
    "math-verify",
    "multiprocess",
    "pandas",
    "pyarrow",
    "pycryptodomex",
    "pylatexenc",
    "six",
    "termcolor",
    "tiktoken",
    "xxhash",
]
NEEDED = "import chz, datasets, tinker, tinker_cookbook, tinker_cookbook.rl.train, torch"


def run(*command: str | Path) -> str:
    """Run a command; its output. Raises RuntimeError with the end of what it said when it fails."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=1200)
    if done.returncode != 0:
        raise RuntimeError((done.stderr or done.stdout).strip()[-600:] or f"{command[0]} failed")
    return done.stdout


def make(directory: Path) -> None:
    """Make or complete the environment. Raises RuntimeError when it cannot be made."""
    python = directory / "bin" / "python"
    if not python.exists():
        run(sys.executable, "-m", "venv", directory)
    packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    link = packages / "project.pth"
    link.unlink(missing_ok=True)  # so that pip sees, and could change, only what is in this environment
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", COOKBOOK, *LIGHT)
    link.write_text(os.path.relpath(sysconfig.get_path("purelib"), packages) + "\n")
    run(python, "-c", NEEDED)


def main(directory: Path) -> int:
    directory.mkdir(parents=True, exist_ok=True)
    reason = directory / "reason"
    try:
        make(directory)
    except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
        reason.write_text(str(error))
        print(f"the cookbook cannot be installed here: {error}", file=sys.stderr)
        return 0
    reason.unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
