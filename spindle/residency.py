"""Where adapters live: on their device, in host memory, or on disk. The least recently used idle ones give way when a budget says so."""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from spindle.compute.adapter import Adapter
from spindle.errors import NotFound

__all__ = ["AdapterPool", "Resident"]

logger = logging.getLogger("spindle")

_BUFFERS = ("params", "exp_avg", "exp_avg_sq", "grads")


@dataclass(eq=False)
class Resident:
    """An adapter as the engine holds it. ``lock`` orders the commits of its gradients; ``users`` counts who needs its buffers now."""

    model_id: str
    client: str
    adapter: Adapter
    home: int  # device index
    optimizer: str = "adamw"
    session: str | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    users: int = 0
    place: str = "device"  # or "host", "disk"

    @property
    def nbytes(self) -> int:
        """Bytes of parameters and moments (a gradient that waits for its step comes on top)."""
        return 3 * 4 * self.adapter.layout.numel


class AdapterPool:
    """device_bytes, host_bytes: budgets of parameters and moments on devices (all together) and in host memory; None = no bound.

    An adapter in use is never moved, so a budget can be overrun by what is in use at once. On a CPU engine the device is host memory:
    ``device_bytes`` is then the only budget, and what gives way goes to disk. Moving changes no bit.
    """

    def __init__(self, device_bytes: int | None = None, host_bytes: int | None = None, directory: str | Path | None = None) -> None:
        self.budgets = {"device": device_bytes, "host": host_bytes}
        self.held = {"device": 0, "host": 0, "disk": 0}
        self._order: OrderedDict[str, Resident] = OrderedDict()  # least recently used first
        self._lock = threading.RLock()
        self._directory = directory
        self._own: tempfile.TemporaryDirectory | None = None

    def add(self, resident: Resident) -> None:
        with self._lock:
            self._order[resident.model_id] = resident
            self.held["device"] += resident.nbytes
            self._shrink()

    def remove(self, resident: Resident) -> None:
        with self._lock:
            if self._order.get(resident.model_id) is resident:
                del self._order[resident.model_id]
                self.held[resident.place] -= resident.nbytes
                if resident.place == "disk":
                    self._file(resident).unlink(missing_ok=True)

    @contextmanager
    def using(self, resident: Resident) -> Iterator[Adapter]:
        """The adapter with its buffers on its device, until the block ends."""
        self.acquire(resident)
        try:
            yield resident.adapter
        finally:
            self.release(resident)

    def acquire(self, *residents: Resident) -> None:
        """Bring adapters to their devices and hold them there until ``release``. All count as held even when one cannot be brought."""
        with self._lock:
            for resident in residents:
                resident.users += 1
                if resident.model_id in self._order:
                    self._order.move_to_end(resident.model_id)
            for resident in residents:
                if resident.place != "device":
                    self._move(resident, "device")
            self._shrink()

    def release(self, resident: Resident) -> None:
        with self._lock:
            resident.users -= 1
            if not resident.users:
                self._shrink()

    def places(self) -> dict[str, int]:
        """How many adapters are where."""
        with self._lock:
            counts = dict.fromkeys(("device", "host", "disk"), 0)
            for resident in self._order.values():
                counts[resident.place] += 1
            return counts

    def close(self) -> None:
        if self._own is not None:
            self._own.cleanup()

    def _shrink(self) -> None:
        for place in ("device", "host"):
            budget = self.budgets[place]
            if budget is None or self.held[place] <= budget:
                continue
            for resident in list(self._order.values()):
                if resident.place == place and not resident.users:
                    to_host = place == "device" and resident.adapter.device.type != "cpu"
                    try:
                        self._move(resident, "host" if to_host else "disk")
                    except OSError as error:  # it stays where it is, whole: over the budget, but nobody's request fails for it
                        logger.warning("adapter %s cannot be paged out: %s", resident.model_id, error)
                        break
                    if self.held[place] <= budget:
                        break

    def _move(self, resident: Resident, place: str) -> None:
        adapter, ours = resident.adapter, self._order.get(resident.model_id) is resident
        if resident.place == "disk":
            if not ours:
                raise NotFound(f"adapter {resident.model_id!r} was unloaded before this request ran")
            self._read(resident)
        if place == "disk":
            self._write(resident)
        else:
            target = adapter.device if place == "device" else torch.device("cpu")
            for name in _BUFFERS:
                buffer = getattr(adapter, name)
                if buffer is not None:
                    setattr(adapter, name, buffer.to(target))
        if ours:
            self.held[resident.place] -= resident.nbytes
            self.held[place] += resident.nbytes
        resident.place = place

    def _file(self, resident: Resident) -> Path:
        if self._directory is None:
            self._own = self._own or tempfile.TemporaryDirectory(prefix="spindle-adapters-")
            self._directory = self._own.name
        return Path(self._directory) / f"{id(resident):x}.adapter"

    def _write(self, resident: Resident) -> None:
        """One file, the buffers one after the other; then the buffers are let go."""
        adapter, path = resident.adapter, self._file(resident)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        try:
            with open(temporary, "wb") as file:
                for name in _BUFFERS:
                    buffer = getattr(adapter, name)
                    if buffer is not None:
                        file.write(buffer.cpu().numpy().data)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        os.replace(temporary, path)
        adapter.drop_buffers()

    def _read(self, resident: Resident) -> None:
        adapter, path = resident.adapter, self._file(resident)
        buffers = torch.from_numpy(np.fromfile(path, dtype=np.float32)).split(adapter.layout.numel)
        for name, buffer in zip(_BUFFERS, buffers, strict=False):
            setattr(adapter, name, buffer.clone())
        path.unlink()
