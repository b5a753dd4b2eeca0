"""Sampling: continuous batching over the base model and adapter snapshots, with keys and values kept and shared."""

from __future__ import annotations

from typing import Any

from spindle.errors import UserError
from spindle.sampling.record import SampleRecord, SampleRecords
from spindle.sampling.request import SampleRequest, validate
from spindle.sampling.sampler import Sampler

__all__ = ["BACKENDS", "SampleRecord", "SampleRecords", "SampleRequest", "Sampler", "make_sampler", "validate"]

BACKENDS = ("spindle", "vllm")


def make_sampler(backend: str, model: Any, tokenizer: Any, records: SampleRecords, **options: Any) -> Any:
    """The sampler of one device. backend: one of BACKENDS. options: further arguments of its class (vllm: ``source``, else model.name).

    Raises UserError for a backend that is not known or not installed.
    """
    if backend == "spindle":
        return Sampler(model, tokenizer, records=records, **options)
    if backend == "vllm":
        from spindle.sampling.vllm_backend import VllmSampler

        return VllmSampler(model, tokenizer, **({"source": model.name} | options), records=records)
    raise UserError(f"sampler is {backend!r}; allowed: {', '.join(BACKENDS)}")
