"""Copies on a stream of their own. The device is a stand-in whose copies arrive only once a stream waits for them."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import spindle
from spindle import SchedulerConfig
from spindle.compute.model import BaseModel
from spindle.compute.upload import Uploader
from spindle.types import Datum
from tests.tiny import VOCAB, tiny_llama

CPU = torch.device("cpu")


class Cuda:
    """What of ``torch.cuda`` an Uploader uses, and a diary of it."""

    def __init__(self):
        self.diary, self.under_way = [], []
        self.side = _Stream(self, "side")

    def Stream(self, device):
        return self.side

    def current_stream(self, device):
        return _Stream(self, "compute")

    @contextlib.contextmanager
    def stream(self, stream):
        assert stream is self.side
        self.diary.append("copy")
        yield


class _Stream:
    def __init__(self, cuda, name):
        self.cuda, self.name = cuda, name

    def record_event(self):
        self.cuda.diary.append(f"event of {self.name}")
        return list(self.cuda.under_way)  # of all threads: the stream is one

    def wait_event(self, event):
        self.cuda.diary.append(f"{self.name} waits")
        for copy in event:
            if copy in self.cuda.under_way:
                self.cuda.under_way.remove(copy)
                copy.there.copy_(copy.here)


@dataclass(eq=False)
class Copy:
    there: torch.Tensor
    here: torch.Tensor


class Late(Uploader):
    """Tensors hold nonsense until a stream has waited for their event."""

    def _to(self, x, device):
        super()._to(x, device)
        there = torch.full_like(x, 7)
        self.cuda.under_way.append(Copy(there, x))
        return there


@pytest.fixture
def kept(monkeypatch):
    """The tensors that were told which stream reads them."""
    told = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, stream: told.append((x, stream.name)), raising=False)
    return told


def datum(n, seed):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCAB, n + 1)
    return Datum(tokens[:-1], {"target_tokens": tokens[1:], "weights": rng.random(n, np.float32)})


def trained(model, uploader=None):
    """Answers and weights of two adapters that share micro-batches, after a step."""
    with spindle.Engine(model, devices=["cpu"], scheduler=SchedulerConfig(token_budget=48)) as engine:
        if uploader is not None:
            engine._loops[0].executor.worker.uploader = uploader
        adapters = [engine.create_adapter(rank=4, seed=seed) for seed in (1, 2)]
        futures = [a.forward_backward([datum(n, n) for n in (20, 5, 16, 9, 30)]) for a in adapters for _ in range(3)]
        answers = [future.result(60) for future in futures]
        for adapter in adapters:
            adapter.optim_step().result(60)
        return answers, [engine.resident(a.model_id).adapter.params.clone() for a in adapters]


def test_a_pass_reads_what_arrived_and_waits_until_it_has(kept):
    model, cuda = BaseModel.load(tiny_llama()), Cuda()
    answers, params = trained(model, Late(CPU, CPU, cuda, types=("cpu",)))
    want, want_params = trained(model)
    for one, other in zip(answers, want, strict=True):
        assert one.metrics == other.metrics
        for a, b in zip(one.loss_fn_outputs, other.loss_fn_outputs, strict=True):
            np.testing.assert_array_equal(a["logprobs"], b["logprobs"])
    assert all(torch.equal(a, b) for a, b in zip(params, want_params, strict=True))
    waits = cuda.diary.count("compute waits")
    assert waits == cuda.diary.count("event of side") >= 6
    first = cuda.diary.index("event of side")
    assert cuda.diary[:first] == ["copy"] * first and first >= 3  # tokens, targets and each segment's weights, then the event
    assert len(kept) == cuda.diary.count("copy") and {name for _, name in kept} == {"compute"}
    assert not cuda.under_way


def test_without_room_for_the_copies_the_pass_makes_them_itself(kept):
    """Which knows how to go on with halves."""
    model, full = BaseModel.load(tiny_llama()), []

    class Full(Uploader):
        def start(self, batch):
            full.append(batch)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(self, "_to", self._no_room)
                super().start(batch)

        def _no_room(self, x, device):
            raise torch.OutOfMemoryError("no room")

    answers, params = trained(model, Full(CPU, CPU, Cuda(), types=("cpu",)))
    want, want_params = trained(model)
    assert full and [one.metrics for one in answers] == [one.metrics for one in want]
    assert all(torch.equal(a, b) for a, b in zip(params, want_params, strict=True))


def test_a_cpu_is_read_where_it_is():
    uploader = Uploader(CPU, CPU)
    assert not uploader.streams
