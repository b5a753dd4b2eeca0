"""The engine: load a base model, make adapters, submit requests, close. The front door of everything that changes an adapter."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from spindle import codec, losses
from spindle.compute.adapter import Adapter
from spindle.compute.groups import group_devices
from spindle.compute.model import BaseModel, load_tokenizer
from spindle.compute.worker import DeviceWorker
from spindle.device_loop import DeviceLoop
from spindle.errors import EngineClosed, InvalidRequest, NotFound, SpindleError, UserError, without_frames
from spindle.executor import Executor, ForwardBackwardResult, Training
from spindle.future import Future, failed
from spindle.handle import AdapterHandle
from spindle.io_loop import IoLoop
from spindle.operations import LoadState, Operation, OptimStep, Publish, SaveState
from spindle.residency import AdapterPool, Resident
from spindle.sampled import recorded_logprobs
from spindle.sampling import SampleRecords, SampleRequest, make_sampler
from spindle.scheduler import Item, Kind, Scheduler, SchedulerConfig
from spindle.store import checkpoint
from spindle.types import AdamParams, DimuonParams, LoraConfig, SampleOutput, SamplingParams

__all__ = ["Engine"]

logger = logging.getLogger("spindle")

OPTIMIZERS = ("adamw", "dimuon")


def resolve_devices(devices: str | Sequence[str]) -> list[torch.device]:
    """``"auto"``: every CUDA device, or else the CPU once. A list may name a device more than once (``["cpu", "cpu"]``)."""
    if devices == "auto":
        count = torch.cuda.device_count()
        return [torch.device("cuda", i) for i in range(count)] if count else [torch.device("cpu")]
    names = [devices] if isinstance(devices, str) else list(devices)
    if not names:
        raise UserError('devices: got an empty list; name at least one, e.g. ["cuda:0"] or ["cpu"], or say "auto"')
    resolved = []
    for name in names:
        try:
            device = torch.device(name)
        except RuntimeError as error:
            raise UserError(f'devices: {name!r} is no torch device; say "cpu", "cuda:0", …') from error
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise UserError(f"devices: {name!r} is not there; this machine has {torch.cuda.device_count()} CUDA devices")
        resolved.append(torch.device("cpu") if device.type == "cpu" else device)  # "cpu:1" is no other place
    return resolved


def _dtype(wanted: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    if wanted is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    name = str(wanted).removeprefix("torch.")
    if name not in ("float32", "bfloat16"):
        raise UserError(f"dtype: got {name!r}; allowed are float32 and bfloat16")
    return getattr(torch, name)


def _replicas(source: Any, places: Sequence[torch.device], layers_per_device: int | None, dtype: torch.dtype) -> list[BaseModel]:
    """The model of each device's thread. Those of one group share the tensors that are spread over its devices."""
    base = source if isinstance(source, BaseModel) else BaseModel.load(source, dtype=dtype, check=False)
    groups, per_device = group_devices(base, places, layers_per_device)
    here = (base.device,) if isinstance(source, BaseModel) and len(groups[0]) == 1 else groups[0]  # one that was given stays where it is
    models: list[BaseModel] = []
    for group in (here, *groups[1:]):
        twin = next((model for model in models if model.devices == group), None)  # its tensors are where this one's are to be
        models.append(base if twin is None and base.devices == group else (twin or base).replica(group, per_device))
        models.extend(models[-1].replica(group, per_device) for _ in group[1:])
    if base is not source:
        models[0].check()
    return models


def _limits_for(model: BaseModel, limits: codec.Limits) -> codec.Limits:
    """``limits`` with the model's vocabulary, and no sequence longer than its context."""
    values = {name: getattr(limits, name) for name in dir(limits) if not name.startswith("_")}
    values["vocab_size"] = model.vocab_size
    values["max_sequence_length"] = min(limits.max_sequence_length, model.max_context)
    return codec.Limits(**values)


def _tokenizer_of(source: Any) -> Any | None:
    """The tokenizer beside a model given by path or name; None when there is none (then there are no stop strings and no text prompts)."""
    if not isinstance(source, str | Path):
        return None
    try:
        return load_tokenizer(source)
    except (OSError, ValueError) as error:
        logger.warning("no tokenizer for %s (%s): stop strings and text prompts are off", source, str(error).splitlines()[0])
        return None


class Engine:
    """A LoRA training engine in this process.

    model: a transformers decoder directory, a GGUF file, a hub name, or a loaded ``BaseModel``.
    devices: "auto", or a list of torch devices; one worker thread each, with its own replica of the base model.
    layers_per_device: decoder layers of a base model too large for one device: adjacent devices then are a group that holds one replica,
        and works on as many micro-batches at once as it has devices. None: spread over GPUs only if, and as far as, memory asks for it.
    dtype: of the base weights ("float32", "bfloat16"), None: float32 on CPU, bfloat16 on CUDA. Adapters, moments and logprobs are always
        float32.
    limits: bounds on what a request may hold (``codec.Limits``); vocabulary and context are taken from the model.
    scheduler: bounds, micro-batch token budget and client weights (``SchedulerConfig``).
    sampling_share: the part of a device's time that sampling may take while training waits, in (0, 1).
    prefetch: fill the next micro-batch while one is computed.
    activation_bytes: what a pass may keep for its backward; past it, layers are computed a second time instead (0: always). None: what is
        free on a GPU, no bound on a CPU.
    adapter_device_bytes, adapter_host_bytes: budgets past which idle adapters are paged out, to host memory, then disk (``AdapterPool``).
    unlisted_logprobs: "skip" answers 0 for a cell that a request's sparse inputs (target_tokens, weights and whatever else its loss
        reads) do not list, and so spares its row the unembedding. Losses, gradients and listed logprobs keep their bits as long as the
        head runs in one chunk. A request with a dense input, and a custom loss, are computed whole either way. A classifier's sequence
        of 1,631 tokens with one labelled row took 1 / 1.19 of the time forward_backward, 1 / 1.33 forward (8 layers of 512, vocabulary
        32,000, one core; ``make bench NAME=unlisted``); the share of the unembedding in the model decides.
    sampler: what samples, "spindle" or, where it is installed, "vllm"; sampler_options: further arguments of its class.

    Every method that changes an adapter is thread-safe and returns a ``spindle.Future``: block with ``.result()`` or ``await`` it.
    """

    def __init__(
        self,
        model: str | Path | BaseModel | Any,
        *,
        devices: str | Sequence[str] = "auto",
        layers_per_device: int | None = None,
        dtype: str | torch.dtype | None = None,
        name: str | None = None,
        limits: codec.Limits | None = None,
        scheduler: SchedulerConfig | None = None,
        sampling_share: float = 0.5,
        prefetch: bool = True,
        activation_bytes: int | None = None,
        adapter_device_bytes: int | None = None,
        adapter_host_bytes: int | None = None,
        unlisted_logprobs: Literal["compute", "skip"] = "compute",
        sampler: str = "spindle",
        sampler_options: Mapping[str, Any] | None = None,
    ) -> None:
        if not 0.0 < sampling_share < 1.0:
            raise UserError(f"sampling_share: got {sampling_share}; allowed is a number between 0 and 1, both excluded")
        if unlisted_logprobs not in ("compute", "skip"):
            raise UserError(f"unlisted_logprobs: got {unlisted_logprobs!r}; allowed are 'compute' and 'skip'")
        places = resolve_devices(devices)
        models = _replicas(model, places, layers_per_device, _dtype(dtype, places[0]))
        self.model = models[0]
        self.model_name = name or self.model.name
        self.limits = _limits_for(self.model, limits or codec.Limits())
        self.config = scheduler or SchedulerConfig()
        per_group = len(self.model.devices)
        self.scheduler = Scheduler(self.config, len(places), per_group)
        self.tokenizer = _tokenizer_of(model)
        self.records = SampleRecords()
        self.pool = AdapterPool(adapter_device_bytes, adapter_host_bytes)
        self._residents: dict[str, Resident] = {}
        self._homes: dict[str, int] = {}  # device of every name in use, from before its adapter is made
        self._lock = threading.Lock()
        self._closed = False
        self._scan_s = 0.0
        self._started_at = time.monotonic()
        self._encoders = ThreadPoolExecutor(1, thread_name_prefix="spindle-encode")
        options = dict(sampler_options or {})
        if sampler == "vllm" and isinstance(model, str | Path):
            options.setdefault("source", os.path.expanduser(model))
        threads = max(1, (os.cpu_count() or 1) // len(places)) if places[0].type == "cpu" and len(places) > 1 else 0
        self._loops: list[DeviceLoop] = []
        for index, (place, replica) in enumerate(zip(places, models, strict=True)):
            executor = Executor(
                DeviceWorker(replica, activation_budget=activation_bytes),
                self.scheduler,
                self.pool,
                pinned=place.type == "cuda",
                skip_unlisted=unlisted_logprobs == "skip",
            )
            samples = index % per_group == 0  # one thread of a group
            sampler_of_device = make_sampler(sampler, replica, self.tokenizer, self.records, **options) if samples else None
            self._loops.append(
                DeviceLoop(
                    index,
                    executor,
                    self.scheduler,
                    sampler_of_device,
                    sampling_share=sampling_share,
                    prefetch=prefetch,
                    cpu_threads=threads,
                )
            )
        self._io = IoLoop(self.scheduler, self.pool, self.model_name)
        for loop in self._loops:
            loop.start()

    # --- adapters -------------------------------------------------------------------------------------------------

    def create_adapter(
        self,
        rank: int = 32,
        *,
        alpha: float = 32.0,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        optimizer: Literal["adamw", "dimuon"] = "adamw",
        model_id: str | None = None,
        client: str = "local",
        session: str | None = None,
        state: str | Path | None = None,
        with_optimizer: bool = False,
    ) -> AdapterHandle:
        """A fresh LoRA adapter: A as PEFT initialises it (from ``seed``; the same seed gives the same bits), B zero.

        state: start from this directory of the same shape instead, a checkpoint or peft's own; ``with_optimizer``: and its optimizer state.
        client: whose account in the fair schedule it runs on. session: whose recorded samples ``stable_reinforce`` may read.
        Raises UserError naming the field for an impossible shape, or what the checkpoint lacks.
        """
        if not isinstance(rank, int) or not 1 <= rank <= 4096:
            raise UserError(f"rank: got {rank!r}; allowed is a whole number from 1 to 4096")
        if not (train_mlp or train_attn or train_unembed):
            raise UserError("train_mlp, train_attn and train_unembed are all false: there is nothing to train; set at least one")
        if seed is not None and (not isinstance(seed, int) or not -(1 << 63) <= seed < 1 << 64):
            raise UserError(f"seed: got {seed!r}; allowed is a whole number of 64 bits")
        if optimizer not in OPTIMIZERS:
            raise UserError(f"optimizer: got {optimizer!r}; allowed are {', '.join(OPTIMIZERS)}")
        lora = LoraConfig(rank, alpha, seed, train_mlp, train_attn, train_unembed)
        model_id = model_id or f"adapter-{uuid.uuid4().hex[:12]}"
        home = self._reserve(model_id)
        try:
            adapter = Adapter(self.model.layout(lora), self._loops[home].executor.worker.device)
            if state is None:
                adapter.init(seed if seed is not None else int.from_bytes(os.urandom(7), "little"))
            else:
                loaded = checkpoint.load_adapter(state, adapter.layout, with_optimizer)
                adapter.load(loaded.params, loaded.optimizer)
        except BaseException:
            with self._lock:
                del self._homes[model_id]
            raise
        resident = Resident(model_id, client, adapter, home, optimizer, session)
        with self._lock:
            if self._closed:
                self._homes.pop(model_id, None)
                raise EngineClosed("the engine is closed")
            self.pool.add(resident)
            self.scheduler.add_adapter(model_id, client, home)
            self._residents[model_id] = resident
        return AdapterHandle(self, model_id, lora)

    def _reserve(self, model_id: str) -> int:
        """Take a name; returns the device with the fewest adapters."""
        with self._lock:
            if self._closed:
                raise EngineClosed("the engine is closed")
            if model_id in self._homes:
                raise UserError(f"model_id: {model_id!r} is already in use")
            counts = [0] * len(self._loops)
            for home in self._homes.values():
                counts[home] += 1
            self._homes[model_id] = counts.index(min(counts))
            return self._homes[model_id]

    def unload(self, model_id: str) -> None:
        """Forget an adapter and free what it holds; requests of it that have not started fail."""
        with self._lock:
            resident = self._residents.pop(model_id, None)
        if resident is None:
            raise NotFound(f"no adapter {model_id!r}")
        self.scheduler.remove_adapter(model_id, NotFound(f"adapter {model_id!r} was unloaded before this request ran"))
        self.pool.remove(resident)
        with self._lock:
            self._homes.pop(model_id, None)  # last: until here the name cannot be taken again

    def resident(self, model_id: str) -> Resident:
        """The engine's record of an adapter. Raises NotFound."""
        resident = self._residents.get(model_id)
        if resident is None:
            raise NotFound(f"no adapter {model_id!r}; create it first")
        return resident

    # --- the one door ---------------------------------------------------------------------------------------------

    def scan(self, body: Any, content_encoding: str | None = None) -> codec.ScannedRequest:
        """Decode and check a forward_backward body. Blocking, without the GIL. Raises MalformedBody, InvalidRequest, and
        Overloaded before anything is decoded when the queue has no room for it."""
        if isinstance(body, bytes | bytearray | memoryview):
            self.scheduler.check_room(len(body))
        started = time.perf_counter()
        try:
            return codec.scan(body, content_encoding, self.limits)
        finally:
            with self._lock:
                self._scan_s += time.perf_counter() - started

    def enqueue(self, request: codec.ScannedRequest, encoded: bool = False) -> Future[ForwardBackwardResult]:
        """Queue a scanned request in its adapter's order. encoded: its result will be asked for as bytes (``encode``), so a large one is
        written as such while it is computed.

        An InvalidRequest (loss inputs that do not fit) takes the request's place in the order and comes back as a failed future. Raises
        NotFound, Conflict, Overloaded, EngineClosed when it takes no place.
        """
        resident = self.resident(request.model_id)
        try:
            config = losses.check(request)
        except InvalidRequest as error:
            return self.reject(request.model_id, request.seq_id, error)
        future: Future[ForwardBackwardResult] = Future()
        item = Item(request.model_id, request.seq_id, Kind.TRAIN, future, fingerprint=bytes(request.fingerprint), nbytes=request.nbytes)
        item.cut(request.lengths, self.config.token_budget, request.num_tokens)
        item.payload = Training.of(request, config, resident, encoded)
        if item.payload.loss.supplied:
            try:
                item.payload.supplied["sampler_logprobs"] = recorded_logprobs(request, self.records, resident.session)
            except UserError as error:
                return self.reject(request.model_id, request.seq_id, error)
        return self.scheduler.put(item)

    def submit(self, body: Any, content_encoding: str | None = None) -> Future[bytes]:
        """One request body in (protobuf, plain or zstd), the bytes of its answer out. Errors come through the future."""
        try:
            try:
                return self.enqueue(self.scan(body, content_encoding), encoded=True).then(ForwardBackwardResult.encode, self._encoders)
            except InvalidRequest as error:
                if error.model_id and error.seq_id > 0 and error.model_id in self._residents:
                    return self.reject(error.model_id, error.seq_id, error)
                return failed(without_frames(error))
        except SpindleError as error:
            return failed(without_frames(error))

    def submit_operation(self, model_id: str, seq_id: int, operation: Operation, fingerprint: bytes | None = None) -> Future[Any]:
        """Queue an operation in its adapter's order. ``fingerprint`` says when a repeat is the same request; by default its content."""
        resident = self.resident(model_id)
        if isinstance(operation, OptimStep):
            wanted = DimuonParams if resident.optimizer == "dimuon" else AdamParams
            if not isinstance(operation.params, wanted):
                error = InvalidRequest(
                    f"optim_step: got {type(operation.params).__name__} for an adapter created with the {resident.optimizer} optimizer",
                    model_id,
                    seq_id,
                )
                return self.reject(model_id, seq_id, error)
        kind = Kind.IO if isinstance(operation, SaveState | LoadState) else Kind.DEVICE
        if fingerprint is None:
            fingerprint = hashlib.blake2b(repr(operation).encode(), digest_size=16).digest()
        item = Item(model_id, seq_id, kind, Future(), payload=(resident, operation), fingerprint=fingerprint)
        item.heavy = isinstance(operation, Publish)
        return self.scheduler.put(item)

    def reject(self, model_id: str, seq_id: int, error: SpindleError) -> Future[Any]:
        """A request that cannot run takes its place in the order, so that those after it do. Returns the failed future."""
        fingerprint = hashlib.blake2b(str(error).encode(), digest_size=16).digest()
        return self.scheduler.put(Item(model_id, seq_id, Kind.SKIP, failed(without_frames(error)), fingerprint=fingerprint))

    # --- sampling -------------------------------------------------------------------------------------------------

    def sample(
        self,
        snapshot: Any | None,
        prompt: Sequence[int] | np.ndarray | str,
        params: SamplingParams | None = None,
        num_samples: int = 1,
        **options: Any,
    ) -> Future[SampleOutput]:
        """Sample from a published snapshot, or from the base model when it is None.

        prompt: token ids, or text when the model has a tokenizer. options: further fields of ``sampling.SampleRequest``.
        Raises UserError naming the field before anything is allocated.
        """
        if self._closed:
            raise EngineClosed("the engine is closed")
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise UserError("prompt: got text, but this model has no tokenizer; pass token ids")
            prompt = self.tokenizer.encode(prompt)
        request = SampleRequest(
            prompt=np.asarray(prompt), params=params or SamplingParams(), num_samples=num_samples, snapshot=snapshot, **options
        )
        loops = [(loop, loop.sampler) for loop in self._loops if loop.sampler is not None]
        if snapshot is not None:
            loops = [(loop, one) for loop, one in loops if loop.executor.worker.device == snapshot.params.device]
        loop, sampler = min(loops, key=lambda pair: pair[1].load())
        future: Future[SampleOutput] = Future()
        sampler.submit(request, future)
        loop.wake()
        return future

    def open_snapshot(self, path: str | Path) -> Any:
        """The weights of a checkpoint directory, for ``sample``. Blocking. Raises NotFound, InvalidRequest when it is not of this model."""
        description = checkpoint.read_description(path)
        adapter = Adapter(self.model.layout(LoraConfig(**description["lora"])), self._loops[0].executor.worker.device)
        adapter.load(checkpoint.load_adapter(path, adapter.layout).params, None)
        return adapter.snapshot(self.model.dtype)

    # --- life -----------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Counters since the start, queues and devices as they are now. Seconds are summed over devices.

        device_busy_s: of each device's thread; the mean of a group's is how long its devices were busy, each a part of every micro-batch.
        """
        loops, queue = self._loops, self.scheduler.stats()
        seconds = {key: sum(loop.executor.seconds[key] for loop in loops) for key in ("fill", "compute", "optim", "encode")}
        seconds |= {key: sum(loop.executor.worker.seconds[key] for loop in loops) for key in ("forward", "backward")}
        seconds |= {"scan": self._scan_s, "sampling": sum(loop.sampling_s for loop in loops)}
        seconds["wait"] = sum(client["waited_s"] for client in queue["clients"].values())
        counts = {key: sum(loop.executor.counts[key] for loop in loops) for key in loops[0].executor.counts}
        batches = counts["micro_batches"]
        sampler = [loop.sampler.stats() for loop in loops if loop.sampler is not None]
        return {
            "uptime_s": time.monotonic() - self._started_at,
            "compute_s": seconds["compute"] + seconds["optim"],
            "seconds": seconds,
            "device_busy_s": [loop.busy_s for loop in loops],
            "micro_batches": batches,
            "micro_batch_fill": counts["tokens"] / (batches * self.config.token_budget) if batches else 0.0,
            "padding_tokens": 0,
            "trained_tokens": counts["tokens"] - counts["forward_tokens"],
            "forward_tokens": counts["forward_tokens"],
            "optim_steps": counts["optim_steps"],
            "adapters": self.pool.places(),
            "adapter_bytes": dict(self.pool.held),
            "sampler": {key: sum(one[key] for one in sampler) for key in sampler[0]},
            "codec_pool": codec.pool_stats(),
            "buffer_bytes": sum(loop.executor.buffers.nbytes for loop in loops),
            "queue": queue,
        }

    def close(self, timeout_s: float = 60.0) -> None:
        """Finish what runs, fail what has not started, end every thread. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.scheduler.close()
        deadline = time.monotonic() + timeout_s
        parts: list[DeviceLoop | IoLoop] = [*self._loops, self._io]
        ended = [part.join(max(0.0, deadline - time.monotonic())) for part in parts]
        if not all(ended):
            logger.error("the engine's threads did not all end within %g s; what they run is left to itself", timeout_s)
        self._encoders.shutdown(wait=True)
        self.pool.close()
        self._residents.clear()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
