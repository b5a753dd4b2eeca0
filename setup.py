"""Builds the two compiled modules. What they need from the system is checked first, so that a missing piece stops
the build with the command that installs it rather than with a page of compiler output.

``python setup.py system_packages`` checks alone, and installs what is missing where it has the right to.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import ClassVar

from setuptools import Command, Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
INSTALL = {  # by package manager, the first one found on the PATH: all the build needs from the system
    "apt-get": "apt-get install -y g++ pkg-config libzstd-dev python3-dev",
    "dnf": "dnf install -y gcc-c++ pkgconf-pkg-config libzstd-devel python3-devel",
    "apk": "apk add g++ pkgconf zstd-dev python3-dev",
    "brew": "brew install pkg-config zstd",
}


def compiler() -> str | None:
    """The C++ compiler that the build will call, or None."""
    for name in (os.environ.get("CXX"), sysconfig.get_config_var("CXX"), "c++", "g++", "clang++"):
        if name and shutil.which(shlex.split(name)[0]):
            return name
    return None


def missing() -> str | None:
    """What the system lacks, in words; None when nothing."""
    if compiler() is None:
        return "a C++17 compiler (none of $CXX, c++, g++, clang++ is on the PATH)"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return f"the Python headers ({sysconfig.get_path('include')}/Python.h)"
    if shutil.which("pkg-config") is None:
        return "pkg-config, by which libzstd is found"
    if subprocess.run(["pkg-config", "--exists", "libzstd >= 1.4"]).returncode != 0:
        return "libzstd 1.4 or newer with its headers (pkg-config knows no libzstd)"
    return None


def install_command() -> str | None:
    """The command that installs all of it on this system; None on a system whose package manager we do not know."""
    for manager, command in INSTALL.items():
        if shutil.which(manager):
            needs_root = manager != "brew" and os.geteuid() != 0
            return f"sudo {command}" if needs_root else command
    return None


def explain(what: str) -> str:
    command = install_command()
    how = f"Install it with:\n\n    {command}\n" if command else "Install it with your system's package manager."
    return f"\nSpindle cannot be built here: {what} is missing.\n{how}"


def pkg_config(flag: str, strip: str) -> list[str]:
    out = subprocess.run(["pkg-config", flag, "libzstd"], check=True, capture_output=True, text=True).stdout
    return [word.removeprefix(strip) for word in shlex.split(out) if word.startswith(strip)]


class SystemPackages(Command):
    description = "check what the build needs from the system; install it as root, else say the command"
    user_options: ClassVar[list[tuple[str, str, str]]] = []

    def initialize_options(self) -> None: ...

    def finalize_options(self) -> None: ...

    def run(self) -> None:
        what, command = missing(), install_command()
        if what and command and not command.startswith("sudo"):
            print(f"{what} is missing: {command}", flush=True)
            if command.startswith("apt-get"):
                subprocess.run(["apt-get", "update", "-q"])
            subprocess.run(shlex.split(command))
            what = missing()
        if what:
            sys.exit(explain(what))


class BuildExt(build_ext):
    def run(self) -> None:
        what = missing()
        if what:
            sys.exit(explain(what))
        self.parallel = self.parallel or os.cpu_count()
        super().run()


def extensions() -> list[Extension]:
    if what := missing():  # metadata can be read without a compiler; a build stops in BuildExt
        print(f"warning: {what} is missing", file=sys.stderr)
        return [Extension("spindle.codec._codec", [])]
    from Cython.Build import cythonize
    from pybind11.setup_helpers import ParallelCompile, Pybind11Extension

    strict = ["-Wall", "-Wextra", "-Werror"] if os.environ.get("CI") or os.environ.get("SPINDLE_WERROR") else ["-Wall", "-Wextra"]
    sources = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("csrc/*.cpp"))
    headers = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("csrc/*.h*"))
    newest_header = max((os.stat(ROOT / header).st_mtime for header in headers), default=0.0)

    def stale(obj: str, source: str) -> bool:
        return os.stat(obj).st_mtime < max(os.stat(source).st_mtime, newest_header)

    ParallelCompile("SPINDLE_BUILD_JOBS", needs_recompile=stale).install()
    codec = Pybind11Extension(
        "spindle.codec._codec",
        sources,
        depends=headers,
        cxx_std=17,
        include_dirs=["csrc", *pkg_config("--cflags-only-I", "-I")],
        library_dirs=pkg_config("--libs-only-L", "-L"),
        libraries=pkg_config("--libs-only-l", "-l"),
        extra_compile_args=["-O3", "-g0", *strict],
    )
    packing = Extension("spindle.scheduler._packing", ["spindle/scheduler/_packing.pyx"], extra_compile_args=["-O3", "-g0"])
    cython = cythonize([packing], language_level=3) if (ROOT / packing.sources[0]).exists() else []
    return [*([codec] if sources else []), *cython]


if __name__ == "__main__":
    setup(ext_modules=extensions(), cmdclass={"build_ext": BuildExt, "system_packages": SystemPackages})
