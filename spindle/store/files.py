"""Directories that are whole or absent: written beside their place, synced, then renamed into it."""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spindle.errors import InvalidRequest

__all__ = ["directory_bytes", "new_directory", "remove_directory"]

TEMPORARY_PREFIX = ".writing-"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)  # Linux with glibc 2.28 or newer


@contextmanager
def new_directory(path: str | os.PathLike[str], replace: bool = False) -> Iterator[Path]:
    """Yield an empty directory to fill; on a clean exit it appears at ``path``, whole and synced to disk.

    On an exception nothing is left behind and what was at ``path`` stays. Raises InvalidRequest when ``path``
    exists and ``replace`` is false. A replaced directory and the new one change places in one step, where the system
    knows how; else there is a moment between two renames at which a crash leaves neither at ``path``.
    """
    target = Path(path).absolute()
    if target.exists() and not replace:
        raise InvalidRequest(f"{target} already exists: choose another name, or allow it to be replaced")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / f"{TEMPORARY_PREFIX}{secrets.token_hex(6)}-{target.name}"
    temporary.mkdir()
    try:
        yield temporary
        for file in temporary.rglob("*"):
            if file.is_file():
                _sync(file)
        _sync(temporary)
        _move_into_place(temporary, target, replace)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _sync(target.parent)


def _move_into_place(temporary: Path, target: Path, replace: bool) -> None:
    if not target.exists():
        os.rename(temporary, target)
        return
    if not replace:
        raise InvalidRequest(f"{target} already exists: choose another name, or allow it to be replaced")
    if _exchange(temporary, target):
        _sync(target.parent)  # before the old one goes
        shutil.rmtree(temporary, ignore_errors=True)
        return
    old = target.parent / f"{TEMPORARY_PREFIX}{secrets.token_hex(6)}-old"
    os.rename(target, old)
    os.rename(temporary, target)
    shutil.rmtree(old, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two directories in one step, so that at no moment either name is without one. False where the system cannot."""
    if _renameat2 is None:
        return False
    return _renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0


def remove_directory(path: str | os.PathLike[str]) -> None:
    """Remove a directory so that it is gone at once for readers: renamed away first, then deleted."""
    target = Path(path)
    if not target.exists():
        return
    doomed = target.parent / f"{TEMPORARY_PREFIX}{secrets.token_hex(6)}-old"
    os.rename(target, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def sweep_temporary(root: str | os.PathLike[str]) -> int:
    """Delete what interrupted writers left under ``root``. Only for a root that no other process writes to."""
    found = [path for path in Path(root).rglob(f"{TEMPORARY_PREFIX}*") if path.is_dir()]
    for path in found:
        shutil.rmtree(path, ignore_errors=True)
    return len(found)


def directory_bytes(path: str | os.PathLike[str]) -> int:
    return sum(file.stat().st_size for file in Path(path).rglob("*") if file.is_file())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
