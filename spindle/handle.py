"""What ``Engine.create_adapter`` returns: one adapter, its seq_ids counted for you."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spindle import codec
from spindle.errors import InvalidRequest
from spindle.future import Future
from spindle.operations import LoadState, OptimStep, Publish, SaveState
from spindle.types import AdamParams, Datum, DimuonParams, ForwardBackwardOutput, LoraConfig, OptimStepOutput, SampleOutput, SamplingParams

if TYPE_CHECKING:
    from spindle.engine import Engine

__all__ = ["AdapterHandle"]


class AdapterHandle:
    """One adapter. Calls run in the order they are made; each returns a future at once (``.result()`` or ``await``)."""

    def __init__(self, engine: Engine, model_id: str, lora: LoraConfig) -> None:
        self.engine = engine
        self.model_id = model_id
        self.lora = lora
        self._seq_id = 0
        self._lock = threading.Lock()

    def forward_backward(
        self, data: Sequence[Datum], loss_fn: str = "cross_entropy", loss_fn_config: Mapping[str, float | str] | None = None
    ) -> Future[ForwardBackwardOutput]:
        """Add the gradient of the summed loss to this adapter's. Gradients add up until ``optim_step``."""
        return self._train(data, loss_fn, loss_fn_config, forward_only=False)

    def forward(
        self, data: Sequence[Datum], loss_fn: str = "cross_entropy", loss_fn_config: Mapping[str, float | str] | None = None
    ) -> Future[ForwardBackwardOutput]:
        """The same logprobs and metrics without a gradient."""
        return self._train(data, loss_fn, loss_fn_config, forward_only=True)

    def _train(
        self, data: Sequence[Datum], loss_fn: str, config: Mapping[str, float | str] | None, forward_only: bool
    ) -> Future[ForwardBackwardOutput]:
        with self._lock:
            seq_id = self._seq_id + 1
            try:
                request = codec.scan_arrays(self.model_id, seq_id, data, loss_fn, dict(config or {}), forward_only, self.engine.limits)
            except InvalidRequest as error:
                self._seq_id = seq_id
                return self.engine.reject(self.model_id, seq_id, error)
            future = self.engine.enqueue(request)
            self._seq_id = seq_id
        return future.then(lambda result: result.output())

    def _operation(self, operation: Any) -> Future[Any]:
        with self._lock:
            future = self.engine.submit_operation(self.model_id, self._seq_id + 1, operation, fingerprint=b"")
            self._seq_id += 1
        return future

    def optim_step(self, params: AdamParams | DimuonParams | None = None) -> Future[OptimStepOutput]:
        """One optimizer step on what has accumulated; the gradient is zero afterwards."""
        return self._operation(OptimStep(params or AdamParams()))

    def save(self, path: str | Path, with_optimizer: bool = True, replace: bool = False, merged: bool = False) -> Future[Path]:
        """Write a checkpoint directory in PEFT layout, whole or not at all. An existing one is refused unless ``replace``.

        merged: a transformers directory of the whole model instead, the adapter merged into its weights.
        """
        base = (self.engine.model, self.engine.tokenizer) if merged else None
        return self._operation(SaveState(Path(path), with_optimizer, replace, merge_into=base))

    def load(self, path: str | Path, with_optimizer: bool = False) -> Future[Path]:
        """Take the weights (and the optimizer state, when asked) of a checkpoint with the same shape; of peft's own, the weights."""
        return self._operation(LoadState(Path(path), with_optimizer))

    def publish(self) -> Future[Any]:
        """A snapshot of the weights as they are after everything called before. It never changes; pass it to ``Engine.sample``."""
        return self._operation(Publish())

    def sample(self, prompt: Any, params: SamplingParams | None = None, num_samples: int = 1, **options: Any) -> Future[SampleOutput]:
        """Sample with the weights as they are after everything called before. See ``Engine.sample``."""
        answer: Future[SampleOutput] = Future()

        def published(first: Any) -> None:
            try:
                sampled = self.engine.sample(first.result(), prompt, params, num_samples, **options)
            except BaseException as error:
                answer.fail(error)
                return
            sampled.add_done_callback(pass_on)

        def pass_on(sampled: Any) -> None:
            try:
                answer.settle(sampled.result())
            except BaseException as error:
                answer.fail(error)

        self.publish().add_done_callback(published)
        return answer

    def unload(self) -> None:
        """Free the adapter."""
        self.engine.unload(self.model_id)
