"""Between the scheduler and a device: blocks become a MicroBatch (codec.fill), results go back to their requests in input order."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from spindle import codec, losses
from spindle.compute.adapter import Adapter
from spindle.compute.batch import MicroBatch, Segment, SegmentResult
from spindle.compute.buffers import BufferPool
from spindle.compute.worker import DeviceWorker
from spindle.errors import ServerError, SpindleError, without_frames
from spindle.halving import run_within_memory
from spindle.metrics import combine_metrics
from spindle.operations import OptimStep, Publish
from spindle.residency import AdapterPool, Resident
from spindle.scheduler import Block, Item, Scheduler
from spindle.types import ForwardBackwardOutput, OptimStepOutput

logger = logging.getLogger("spindle")


class ForwardBackwardResult:
    """The answer to one forward or forward_backward: flat logprobs in input order and metrics.

    logprobs: [cells] float32; lengths, widths: [D] int64 (width 0 = ``[N]``, K = ``[N, K]``). encoded: the same as the bytes of a
    protobuf ForwardBackwardOutput, for one that was written as such; logprobs are then empty.
    """

    def __init__(
        self,
        logprobs: np.ndarray,
        lengths: np.ndarray,
        widths: np.ndarray,
        metrics: dict[str, float],
        seconds: dict[str, float],
        encoded: bytes | None = None,
    ) -> None:
        self.logprobs = logprobs
        self.lengths = lengths
        self.widths = widths
        self.metrics = metrics
        self._seconds = seconds  # where the time of encoding is counted
        self._encoded = encoded
        self._lock = threading.Lock()

    def encode(self) -> bytes:
        """The protobuf ForwardBackwardOutput, written once."""
        with self._lock:
            if self._encoded is None:
                started = time.perf_counter()
                self._encoded = codec.encode_forward_backward(self.logprobs, self.lengths, self.widths, self.metrics)
                self._seconds["encode"] += time.perf_counter() - started
                self.logprobs = self.logprobs[:0]  # the bytes are what every later poll returns
            return self._encoded

    def output(self) -> ForwardBackwardOutput:
        """The same as numpy arrays, one dict per datum."""
        with self._lock:
            if self._encoded is not None:
                return codec.decode_forward_backward(self._encoded)
            ends = np.cumsum(self.lengths * np.maximum(self.widths, 1))
            pieces = np.split(self.logprobs, ends[:-1])
        outputs = [
            {"logprobs": piece.reshape(length, width) if width else piece}
            for piece, length, width in zip(pieces, self.lengths.tolist(), self.widths.tolist(), strict=True)
        ]
        return ForwardBackwardOutput(outputs, self.metrics)


@dataclass(eq=False)
class Training:
    """Payload of a TRAIN item: what is asked, and what has come back so far."""

    request: codec.ScannedRequest
    config: dict[str, float | str]
    resident: Resident
    loss: losses.Loss  # held from here on: a custom one may be forgotten while the request waits
    inputs: dict[str, float | None]  # what the loss reads of each datum, with what an absent one counts as (None: it is there)
    encoded: bool = False  # the answer is wanted as bytes
    logprobs: np.ndarray | None = None  # [cells] float32, from the first block that comes back
    answer: codec.Answer | None = None  # instead, where it is wanted as bytes and comes in several blocks
    metrics: dict[int, tuple[dict[str, float], int]] = field(default_factory=dict)
    waiting: dict[int, torch.Tensor] = field(default_factory=dict)  # gradients of blocks that came early
    next_grad: int = 0
    grad: torch.Tensor | None = None
    supplied: dict[str, np.ndarray] = field(default_factory=dict)  # inputs that the engine adds, [cells] float32 in input order
    affordable: bool = False  # its loss's check_work has passed

    @classmethod
    def of(cls, request: codec.ScannedRequest, config: dict[str, float | str], resident: Resident, encoded: bool) -> Training:
        """Of a request that ``losses.check`` has passed."""
        loss = losses.get(request.loss_fn, config)
        known = request.input_names
        inputs = {
            name: value
            for name, value in {**dict.fromkeys(loss.required), **loss.optional}.items()
            if name not in loss.ranks and (value is not None or name in known)
        }
        return cls(request, config, resident, loss, inputs, encoded)

    def take(self, block: Block, logprobs: np.ndarray, metrics: dict[str, float], grad: torch.Tensor | None) -> None:
        """Put one block's result in its place; gradients are added in block order whatever order they come in."""
        if len(block.item.blocks) == 1:
            self.logprobs = logprobs.copy()  # what came is a part of its micro-batch's
        elif self.encoded:
            self.answer = self.answer or codec.Answer(self.request.lengths, self.request.target_widths)
            self.answer.place(block.datums, logprobs)
        else:
            self._place(block.datums, logprobs)
        self.metrics[block.index] = (metrics, len(block.datums))
        if grad is None:
            return
        self.waiting[block.index] = grad
        while (following := self.waiting.pop(self.next_grad, None)) is not None:
            self.grad = following if self.grad is None else self.grad.add_(following.to(self.grad.device))
            self.next_grad += 1

    def _place(self, datums: np.ndarray, logprobs: np.ndarray) -> None:
        starts = self.request.cell_starts
        if self.logprobs is None:
            self.logprobs = np.empty(starts[-1], dtype=np.float32)
        at = 0
        for start, stop in zip(starts[datums].tolist(), starts[datums + 1].tolist(), strict=True):
            self.logprobs[start:stop] = logprobs[at : at + stop - start]
            at += stop - start

    def result(self, seconds: dict[str, float]) -> ForwardBackwardResult:
        metrics, encoded = combine_metrics([self.metrics[index] for index in sorted(self.metrics)]), None
        if self.answer is not None:
            encoded, self.logprobs = self.answer.finish(list(metrics.items())), np.empty(0, np.float32)
        assert self.logprobs is not None
        return ForwardBackwardResult(self.logprobs, self.request.lengths, self.request.target_widths, metrics, seconds, encoded)


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


class Executor:
    """Runs what the scheduler hands out for one device. ``run`` and ``operate`` are called from that device's thread only, ``settle`` from
    it or from one beside it."""

    def __init__(self, worker: DeviceWorker, scheduler: Scheduler, pool: AdapterPool, pinned: bool, skip_unlisted: bool = False) -> None:
        self.worker = worker
        self.scheduler = scheduler
        self.pool = pool
        self.buffers = BufferPool(pinned)
        self.skip_unlisted = skip_unlisted
        self.seconds = {"fill": 0.0, "compute": 0.0, "optim": 0.0, "encode": 0.0}
        self.counts = {"micro_batches": 0, "tokens": 0, "forward_tokens": 0, "optim_steps": 0}

    # --- training -------------------------------------------------------------------------------------------------

    def fill(self, blocks: Sequence[Block]) -> MicroBatch | None:
        """The blocks as one micro-batch; None when that failed, which has then failed their requests."""
        started = time.perf_counter()
        blocks = [block for block in self._bring(blocks) if self._affordable(block)]
        if not blocks:
            return None
        try:
            batch = self._fill(blocks)
            self.worker.uploader.start(batch)
            return batch
        except Exception as error:
            logger.exception("filling a micro-batch failed")
            for block in blocks:
                self.finish(block, None, as_server_error(error, block.item))
            return None
        finally:
            self.seconds["fill"] += time.perf_counter() - started

    def _affordable(self, block: Block) -> bool:
        """Whether the block's loss may cost what it costs: asked once per request, before any of it runs. Otherwise it has failed."""
        training: Training = block.item.payload
        if training.loss.check_work is None or training.affordable:
            return True
        try:
            request = training.request
            training.loss.check_work(request.lengths, request.target_widths, {n: request.input_widths(n) for n in training.loss.ranks})
            training.affordable = True
        except Exception as error:
            self.finish(block, None, as_server_error(error, block.item))
        return training.affordable

    def _bring(self, blocks: Sequence[Block]) -> Sequence[Block]:
        """The blocks whose adapters are on their device now; the others have failed."""
        residents = [block.item.payload.resident for block in blocks]
        try:
            self.pool.acquire(*residents)
            return blocks
        except Exception:  # one of them cannot be brought; which?
            for resident in residents:
                self.pool.release(resident)
        here = []
        for block, resident in zip(blocks, residents, strict=True):
            try:
                self.pool.acquire(resident)
                here.append(block)
            except Exception as error:
                logger.warning("adapter %s cannot be brought to its device: %s", resident.model_id, error)
                self.finish(block, None, as_server_error(error, block.item))
        return here

    def _fill(self, blocks: Sequence[Block]) -> MicroBatch:
        """Those of one adapter lie side by side. This is the only copy from request to device."""
        order: dict[int, list[Block]] = {}
        for block in blocks:
            order.setdefault(id(block.item.payload.resident), []).append(block)
        blocks = [block for group in order.values() for block in group]
        lengths = _joined([block.of(block.item.payload.request.lengths) for block in blocks])
        widths = _joined([block.of(block.item.payload.request.target_widths) for block in blocks])
        cell_ends = list(accumulate(_joined([block.of(block.item.payload.request.cells) for block in blocks]).tolist()))
        num_tokens, num_cells = sum(block.tokens for block in blocks), cell_ends[-1]
        most_inputs = max(len(block.item.payload.inputs) for block in blocks)
        written = sum(int(block.of(block.item.payload.request.written_cells).sum()) for block in blocks)
        buffers = self.buffers.take(num_tokens, num_cells, most_inputs * num_cells, written)
        tokens, targets, values = buffers.host
        batch = MicroBatch(buffers.tokens[:num_tokens], buffers.targets[:num_cells], lengths, widths, [], buffers)
        row = cell = seq = at = 0  # at: in values
        for block in blocks:
            training: Training = block.item.payload
            seqs = slice(seq, seq + len(block.datums))
            rows, cells = slice(row, row + block.tokens), slice(cell, cell_ends[seqs.stop - 1])
            inputs, spans = {}, {}
            for name, default in training.inputs.items():
                spans[name] = slice(at, at + cells.stop - cell)
                inputs[name] = values[spans[name]], default
                at = spans[name].stop
            codec.fill(training.request, block.datums, tokens[rows], targets[cells], inputs, buffers.zeroed)
            segment = Segment(
                adapter=training.resident.adapter,
                loss_fn=training.request.loss_fn,
                config=training.config,
                backward=not training.request.forward_only,
                seqs=seqs,
                rows=rows,
                cells=cells,
                inputs={name: buffers.inputs[span] for name, span in spans.items()} | self._other_inputs(training, block),
                loss=training.loss,
                listed=self._listed(training, block),
                tag=block,
            )
            batch.segments.append(segment)
            row, cell, seq = rows.stop, cells.stop, seqs.stop
        return batch

    def _listed(self, training: Training, block: Block) -> np.ndarray | None:
        """Of a loss that counts nothing where weights are 0: the cells of the block that its inputs list; None when that is all."""
        if not self.skip_unlisted or "weights" not in training.loss.optional:
            return None
        cells = codec.listed_cells(training.request, block.datums, ["target_tokens", *training.inputs])
        return cells if len(cells) < int(block.of(training.request.cells).sum()) else None

    def _other_inputs(self, training: Training, block: Block) -> dict[str, torch.Tensor]:
        """What codec.fill does not write: inputs of another shape than the targets (a custom loss's), and those of our own records."""
        if not training.loss.ranks and not training.supplied:
            return {}
        starts, cells = training.request.cell_starts, int(block.of(training.request.cells).sum())
        spread = {name: torch.from_numpy(codec.spread_input(training.request, block.datums, name)) for name in training.loss.ranks}
        return {name: x if len(x) == cells else x.view(cells, -1) for name, x in spread.items()} | {
            name: torch.from_numpy(np.concatenate([values[starts[d] : starts[d + 1]] for d in block.datums.tolist()]))
            for name, values in training.supplied.items()
        }

    def run(self, batch: MicroBatch) -> list[SegmentResult] | None:
        """Compute a micro-batch; ``settle`` takes the results. None when it failed, which has then failed its requests."""
        started = time.perf_counter()
        try:
            return run_within_memory(self.worker.run, batch)
        except BaseException as error:
            logger.exception("a micro-batch of %d tokens failed", len(batch.tokens))
            for segment in batch.segments:
                self.finish(segment.tag, None, as_server_error(error, segment.tag.item))
            if not isinstance(error, Exception):
                raise
            return None
        finally:
            self.seconds["compute"] += time.perf_counter() - started

    def settle(self, batch: MicroBatch, results: Sequence[SegmentResult]) -> None:
        """Give every block its result and the pool its buffers. By any thread, one call at a time."""
        self._give_back(batch)
        self.counts["micro_batches"] += 1
        self.counts["tokens"] += len(batch.tokens)
        self.counts["forward_tokens"] += sum(s.rows.stop - s.rows.start for s in batch.segments if not s.backward)
        for result in results:
            self.finish(result.segment.tag, result, None)

    def _give_back(self, batch: MicroBatch) -> None:
        """The buffers of a micro-batch that has run, before its requests let go of their bodies, which know what to clear.

        What failed does not come here: its buffers are freed, whatever they hold.
        """
        started = time.perf_counter()
        buffers, batch.buffers = batch.buffers, None
        assert buffers is not None
        try:
            for segment in batch.segments if buffers.zeroed else ():
                training: Training = segment.tag.item.payload
                inputs = {name: (segment.inputs[name], default) for name, default in training.inputs.items()}
                codec.clear(training.request, segment.tag.datums, batch.targets[segment.cells], inputs)
            self.buffers.give_back(buffers)
        except Exception:
            logger.exception("the buffers of a micro-batch could not be cleared; new ones will be taken")
        self.seconds["fill"] += time.perf_counter() - started

    def finish(self, block: Block, result: SegmentResult | None, error: SpindleError | None) -> None:
        """A filled block is over: put its result in its place, or fail its request; commit what is whole; let what waits go on."""
        item = block.item
        training: Training = item.payload
        error = error or (result.error if result is not None else None)
        if error is not None:
            self.scheduler.fail(item, without_frames(error))
        if result is not None:
            try:
                with training.resident.lock:
                    if not item.failed:
                        training.take(block, result.logprobs.numpy(), result.metrics, result.grad)
            except Exception as problem:  # no memory for its answer: that is this request's alone
                self.scheduler.fail(item, as_server_error(problem, item))
        with training.resident.lock:
            committed = self.scheduler.completed(block)
            over, failed = item.blocks_left == 0, item.failed  # under the lock: of the threads that ran its blocks, one saw the last end
            for whole in committed:  # one that ended before those in front of it kept its payload until now
                grad = whole.payload.grad
                if grad is not None:
                    self.worker.accumulate(whole.payload.resident.adapter, grad)
                whole.drop_payload()
        self.pool.release(training.resident)
        if failed and not item.blocks_running:
            item.drop_payload()
        self.scheduler.block_done(block)
        if over and not failed:
            try:
                answer = training.result(self.seconds)
            except Exception as problem:
                item.future.fail(as_server_error(problem, item))
                return
            training.request.release()
            item.future.settle(answer)

    # --- operations -----------------------------------------------------------------------------------------------

    def operate(self, items: Sequence[Item]) -> None:
        """Run device operations that became ready together; optimizer steps with the same settings run as one pass."""
        together: dict[Any, list[Item]] = {}
        for item in items:
            operation = item.payload[1]
            together.setdefault(operation.params if isinstance(operation, OptimStep) else item, []).append(item)
        for group in together.values():
            here = [item for item in group if self._brought(item)]
            if not here:
                continue
            try:
                values = self._operate(here[0].payload[1], [item.payload[0].adapter for item in here])
            except Exception as error:
                logger.exception("%s of %d adapters failed", type(here[0].payload[1]).__name__, len(here))
                values = [as_server_error(error, item) for item in here]
            for item, value in zip(here, values, strict=True):
                self._answer(item, value)

    def _brought(self, item: Item) -> bool:
        """Whether the operation's adapter is on its device now; otherwise the operation has failed, and no other."""
        try:
            self.pool.acquire(item.payload[0])
            return True
        except Exception as error:
            logger.exception("adapter %s cannot be brought to its device", item.model_id)
            self._answer(item, as_server_error(error, item))
            return False

    def _answer(self, item: Item, value: Any) -> None:
        self.pool.release(item.payload[0])
        self.scheduler.operation_done(item)
        item.drop_payload()
        item.future.fail(value) if isinstance(value, SpindleError) else item.future.settle(value)

    def _operate(self, operation: Any, adapters: list[Adapter]) -> list[Any]:
        match operation:
            case OptimStep(params):
                started = time.perf_counter()
                metrics = self.worker.optim_step(adapters, params)
                self.counts["optim_steps"] += len(adapters)
                self.seconds["optim"] += time.perf_counter() - started
                return [OptimStepOutput(one) for one in metrics]
            case Publish():
                return [adapter.snapshot(self.worker.model.dtype) for adapter in adapters]
        raise ServerError(f"operation {type(operation).__name__} does not run on a device")


def as_server_error(error: BaseException, item: Item) -> SpindleError:
    """Our own errors pass as they are; anything else becomes a ServerError that says what failed and that nothing was changed."""
    if isinstance(error, SpindleError):
        return without_frames(error)
    if isinstance(error, torch.OutOfMemoryError):
        return ServerError(f"out of memory on the device even with one sequence of seq_id {item.seq_id} at a time; send shorter sequences")
    failure = ServerError(
        f"{type(error).__name__} while running seq_id {item.seq_id} of {item.model_id}: {error}; the adapter is as it was before"
    )
    failure.__cause__ = without_frames(error)
    return failure
