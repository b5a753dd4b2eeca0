"""One device: runs micro-batches and optimizer steps, one at a time, in the caller's thread."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from spindle import losses, optim
from spindle.compute.adapter import Adapter, AdapterWeights
from spindle.compute.asked import Asked
from spindle.compute.attention import Packing
from spindle.compute.batch import MicroBatch, Segment, SegmentResult
from spindle.compute.head import HeadTask
from spindle.compute.lora import MIN_ROWS, RowGroup
from spindle.compute.model import BaseModel
from spindle.compute.upload import Uploader
from spindle.errors import InvalidRequest, UserError
from spindle.types import AdamParams, DimuonParams

__all__ = ["DeviceWorker"]


class _Task:
    """A segment on the device: its loss as the head asks for it, and what the loss came to."""

    def __init__(self, segment: Segment, batch: MicroBatch, inputs: dict[str, torch.Tensor]) -> None:
        self.segment = segment
        self.loss = segment.loss or losses.get(segment.loss_fn, segment.config)
        widths = batch.widths[segment.seqs]
        offsets = np.concatenate([[0], np.cumsum(np.maximum(widths, 1) * batch.lengths[segment.seqs])])
        if segment.listed is not None:  # the loss sees these cells only; the others count as 0
            at = torch.from_numpy(segment.listed)
            inputs, offsets = {name: x[at.to(x.device)] for name, x in inputs.items()}, np.searchsorted(segment.listed, offsets)
        self.inputs = inputs
        self.sequences = losses.Sequences(offsets, widths)
        self.value: torch.Tensor | float = 0.0
        self.error: UserError | None = None

    def evaluate(self, p: torch.Tensor, lo: int, hi: int) -> torch.Tensor:
        """Loss per cell of the cells [lo, hi) of the segment, whose logprobs are p."""
        inputs = {name: x[lo:hi] for name, x in self.inputs.items()}
        cells = self.loss.fn(p, inputs, self.segment.config, self.sequences)
        self.value = self.value + cells.detach().sum(dtype=torch.float64)
        return cells

    def gradient(self, p: torch.Tensor, lo: int, hi: int) -> torch.Tensor:
        """dloss/dp of those cells; zeros when the loss refuses them, which fails this segment alone."""
        try:
            with torch.enable_grad():
                leaf = p.detach().clone().requires_grad_()
                total = self.evaluate(leaf, lo, hi).sum()
                return torch.autograd.grad(total, leaf)[0] if total.requires_grad else torch.zeros_like(p)
        except Exception as error:
            self.error = self._users(error)
            return torch.zeros_like(p)

    def _users(self, error: Exception) -> UserError:
        """What a loss came to grief on, when it is its client's to mend: a refusal, or anything in a client's own loss. Raises the rest."""
        if isinstance(error, UserError):
            return error
        if self.segment.loss_fn != "custom" or isinstance(error, torch.OutOfMemoryError):
            raise error
        return InvalidRequest(f"custom loss: {str(error).partition(chr(10))[0][:300] or type(error).__name__}")

    def result(self, p: torch.Tensor, host: torch.Tensor, grad: torch.Tensor | None) -> SegmentResult:
        """p: the segment's logprobs on the device; host: the same on the host."""
        metrics: dict[str, float] = {}
        try:
            if not self.segment.backward:
                self.evaluate(p, 0, len(p))
            if self.error is None:
                metrics = {"loss:sum": float(self.value)}
                if self.loss.metrics is not None:
                    metrics |= self.loss.metrics(p, self.inputs, self.segment.config, self.sequences)
        except Exception as error:
            self.error = self._users(error)
        return SegmentResult(self.segment, host, metrics, None if self.error else grad, self.error)


def positions_of(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    """[T] int64, from 0 in every sequence. Made on the device: they are eight bytes a token to copy."""
    counts = torch.tensor(lengths)
    starts, total = counts.cumsum(0) - counts, int(counts.sum())
    starts, counts = starts.to(device, non_blocking=True), counts.to(device, non_blocking=True)
    return torch.arange(total, device=device) - torch.repeat_interleave(starts, counts, output_size=total)


def _free_bytes(device: torch.device) -> float:
    if device.type != "cuda":
        return float("inf")
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


class DeviceWorker:
    """model: this thread's replica. Not for use by two threads at once, but sampling may use the model meanwhile. device: where tokens
    enter, adapters lie and gradients come back; the first of a spread model's.

    activation_budget: bytes that a micro-batch may keep for its backward; one that needs more checkpoints its activations (about a
    third more time, the same bits). None: what is free on a GPU, no bound on a CPU. 0: always checkpoint.
    """

    def __init__(self, model: BaseModel, activation_budget: int | None = None) -> None:
        self.model = model
        self.activation_budget = activation_budget
        self.device = model.device
        self.uploader = Uploader(model.device, model.devices[-1])  # of a spread model: hidden states, logprobs and losses are on the last
        self.seconds = {"forward": 0.0, "backward": 0.0}  # of the host; the head, which does both at once, counts as forward

    def run(self, batch: MicroBatch) -> list[SegmentResult]:
        """One result per segment, in order. Adapters are only read; a failure leaves nothing behind.

        What a loss finds wrong with its own segment comes back as that result's ``error``; its neighbours are not touched.
        """
        model, device = self.model, self.device
        uploaded = self.uploader.wait(batch)
        tokens, targets = uploaded.tokens, uploaded.targets
        lengths, short = list(batch.lengths), MIN_ROWS - len(tokens)
        if short > 0:  # a row keeps its bits only from MIN_ROWS rows up: add a sequence that nobody asked for
            tokens = F.pad(tokens, (0, short))
            lengths.append(short)
        started = time.perf_counter()
        tasks = [_Task(s, batch, inputs) for s, inputs in zip(batch.segments, uploaded.inputs, strict=True)]
        weights: dict[int, AdapterWeights] = {}
        groups = []
        for s in batch.segments:
            if id(s.adapter) not in weights:
                weights[id(s.adapter)] = s.adapter.weights(model.dtype, device)
            grad = torch.empty(s.adapter.layout.numel, device=device) if s.backward else None
            groups.append(RowGroup(s.rows.start, s.rows.stop, weights[id(s.adapter)], grad))
        backward = any(s.backward for s in batch.segments)
        if backward:
            model.checkpoint_activations(len(tokens) * model.activation_bytes > self._budget())
        with torch.set_grad_enabled(backward):
            route = model.route(groups)
            hidden = model.hidden(tokens.long(), positions_of(lengths, device), Packing(lengths), route)
        updates = {u.start: u for u in route.updates(model.head.path)}
        asked = Asked.of(batch)
        head_tasks = []
        for s, task, rows, cells in zip(batch.segments, tasks, asked.rows_of, asked.cells_of, strict=True):
            update = updates.get(s.rows.start)
            update = update and update._replace(start=rows.start, stop=rows.stop)
            head_tasks.append(HeadTask(rows, cells, update, task.gradient if s.backward else None, task.loss.whole_segment))
        found, dhidden = asked.run(model.head, hidden.detach(), head_tasks, targets)
        logprobs = asked.spread(found)
        middle = time.perf_counter()
        if hidden.requires_grad:
            hidden.backward(dhidden)
        route.finish()
        host = logprobs.cpu()
        self.seconds["forward"] += middle - started
        self.seconds["backward"] += time.perf_counter() - middle
        parts = zip(batch.segments, tasks, groups, asked.cells_of, strict=True)
        return [task.result(found[cells], host[s.cells], group.grad) for s, task, group, cells in parts]

    def _budget(self) -> float:
        if self.activation_budget is not None:
            return self.activation_budget
        # A stage keeps its layers' share of a micro-batch, and as many micro-batches as there are stages may be under way: the two cancel.
        return min(0.8 * _free_bytes(device) for device in self.model.devices)

    def accumulate(self, adapter: Adapter, grad: torch.Tensor) -> None:
        """Add a segment's flat gradient to the adapter's, which takes ``grad`` over when it is the first."""
        grad = grad.to(adapter.device)
        if adapter.grads is None:
            adapter.grads = grad
        else:
            adapter.grads.add_(grad)

    def optim_step(self, adapters: Sequence[Adapter], params: AdamParams | DimuonParams) -> list[dict[str, float]]:
        """One step of each with what is accumulated, which is then cleared. Returns the metrics of the answers."""
        return optim.step_together(adapters, params)
