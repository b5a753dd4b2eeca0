"""Sampling: continuous batching over the base model and adapter snapshots, with keys and values kept and shared."""

from spindle.sampling.record import SampleRecord, SampleRecords
from spindle.sampling.request import SampleRequest, validate
from spindle.sampling.sampler import Sampler

__all__ = ["SampleRecord", "SampleRecords", "SampleRequest", "Sampler", "validate"]
