"""Saves and loads: on their own threads, so that a slow disk never holds up a device."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

from spindle.executor import as_server_error
from spindle.operations import LoadState, SaveState
from spindle.residency import AdapterPool, Resident
from spindle.scheduler import Item, Scheduler
from spindle.store import checkpoint
from spindle.store.merged import check_mergeable, save_merged
from spindle.threads import join_all

logger = logging.getLogger("spindle")


class IoLoop:
    """Two threads that pull saves and loads from the scheduler."""

    def __init__(self, scheduler: Scheduler, pool: AdapterPool, base_model: str, threads: int = 2) -> None:
        self.scheduler = scheduler
        self.pool = pool
        self.base_model = base_model
        self._threads = [threading.Thread(target=self._run, name=f"spindle-io-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    def join(self, timeout_s: float) -> bool:
        return join_all(self._threads, timeout_s)

    def _run(self) -> None:
        while (item := self.scheduler.next_io()) is not None:
            resident, operation = item.payload
            try:
                value: Any = self._save(item, resident, operation) if isinstance(operation, SaveState) else self._load(resident, operation)
            except Exception as error:
                logger.warning("%s of %s failed: %s", type(operation).__name__, item.model_id, error)
                self.scheduler.operation_done(item)
                item.drop_payload()
                item.future.fail(as_server_error(error, item))
            else:
                self.scheduler.operation_done(item)
                item.drop_payload()
                item.future.settle(value)

    def _save(self, item: Item, resident: Resident, operation: SaveState) -> Path:
        if operation.merge_into:
            check_mergeable(operation.merge_into[0])
        with self.pool.using(resident) as adapter:
            params = adapter.params.detach().to("cpu", copy=True)
            optimizer = None
            if operation.with_optimizer and not operation.merge_into:
                optimizer = (adapter.exp_avg.to("cpu", copy=True), adapter.exp_avg_sq.to("cpu", copy=True), adapter.step)
        self.scheduler.release_adapter(item)  # the copy is taken: training goes on while the file is written
        if operation.merge_into:
            base, tokenizer = operation.merge_into
            save_merged(operation.path, base, adapter.layout, params, tokenizer, operation.replace)
            return operation.path
        checkpoint.save_adapter(operation.path, adapter.layout, params, self.base_model, optimizer, operation.metadata, operation.replace)
        return operation.path

    def _load(self, resident: Resident, operation: LoadState) -> Path:
        loaded = checkpoint.load_adapter(operation.path, resident.adapter.layout, operation.with_optimizer)
        with self.pool.using(resident) as adapter:
            adapter.load(loaded.params, loaded.optimizer)
        return operation.path
