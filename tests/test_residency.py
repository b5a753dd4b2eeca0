"""Paging adapters out and back: budgets hold, bits do not change, what is in use stays."""

import numpy as np
import pytest
import torch

import spindle
from spindle import AdamParams
from spindle.compute.adapter import Adapter
from spindle.compute.model import BaseModel
from spindle.errors import NotFound, ServerError
from spindle.residency import AdapterPool, Resident
from spindle.types import LoraConfig
from tests.test_engine import datum
from tests.tiny import tiny_llama


@pytest.fixture(scope="module")
def model():
    return BaseModel.load(tiny_llama())


def resident(model, name, seed=0):
    adapter = Adapter(model.layout(LoraConfig(rank=4))).init(seed)
    adapter.exp_avg.normal_()
    adapter.exp_avg_sq.normal_()
    return Resident(name, "c", adapter, 0)


def test_the_least_recently_used_goes_to_disk_and_comes_back_bit_for_bit(model, tmp_path):
    residents = [resident(model, f"m{i}", i) for i in range(4)]
    kept = [[getattr(r.adapter, b).clone() for b in ("params", "exp_avg", "exp_avg_sq")] for r in residents]
    residents[0].adapter.grads = torch.full_like(residents[0].adapter.params, 0.5)
    pool = AdapterPool(device_bytes=2 * residents[0].nbytes, directory=tmp_path)
    for r in residents:
        pool.add(r)
    assert [r.place for r in residents] == ["disk", "disk", "device", "device"]
    assert pool.places() == {"device": 2, "host": 0, "disk": 2}
    assert residents[0].adapter.params.numel() == 0
    with pool.using(residents[0]) as adapter:
        assert [r.place for r in residents] == ["device", "disk", "disk", "device"]
        assert torch.equal(adapter.grads, torch.full_like(adapter.params, 0.5))
        for name, before in zip(("params", "exp_avg", "exp_avg_sq"), kept[0], strict=True):
            assert torch.equal(getattr(adapter, name), before)
    assert len(list(tmp_path.iterdir())) == 2
    for r in residents:
        pool.remove(r)
    assert list(tmp_path.iterdir()) == []
    assert pool.held == {"device": 0, "host": 0, "disk": 0}


def test_what_is_in_use_is_not_moved(model, tmp_path):
    residents = [resident(model, f"m{i}", i) for i in range(3)]
    pool = AdapterPool(device_bytes=0, directory=tmp_path)
    for r in residents:
        pool.add(r)
    pool.acquire(*residents)
    assert pool.places()["device"] == 3
    for r in residents:
        pool.release(r)
    assert pool.places()["disk"] == 3


def test_training_under_a_budget_for_one_equals_training_without(model):
    ends = []
    for budget in (None, 1):
        with spindle.Engine(model, adapter_device_bytes=budget) as engine:
            adapters = [engine.create_adapter(rank=4, seed=i) for i in range(3)]
            for step in range(3):
                for adapter in adapters:
                    adapter.forward_backward([datum(8, seed=step)])
                for adapter in adapters:
                    adapter.optim_step(AdamParams(learning_rate=1e-2)).result(60)
            if budget:
                assert engine.stats()["adapters"]["disk"] >= 2
            states = [engine.resident(a.model_id) for a in adapters]
            for r in states:
                engine.pool.acquire(r)
            ends.append([(r.adapter.params.clone(), r.adapter.exp_avg_sq.clone()) for r in states])
    for ours, theirs in zip(*ends, strict=True):
        assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
    assert np.isfinite(ends[0][0][0].numpy()).all()


def test_a_full_disk_keeps_adapters_in_memory_and_fails_nobody(model, monkeypatch):
    with spindle.Engine(model, adapter_device_bytes=1) as engine:
        adapters = [engine.create_adapter(rank=4, seed=i) for i in range(2)]
        with monkeypatch.context() as patch:
            patch.setattr("spindle.residency.os.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
            for adapter in adapters * 2:
                assert adapter.forward_backward([datum(4)]).result(30).loss > 0
                assert adapter.optim_step(AdamParams()).result(30).metrics["grad_norm"] > 0
        adapters[0].forward([datum(4)]).result(30)
        assert engine.stats()["adapters"]["disk"] >= 1


def test_an_adapter_that_cannot_be_read_back_fails_alone(model, monkeypatch):
    with spindle.Engine(model, adapter_device_bytes=1) as engine:
        lost, well = (engine.create_adapter(rank=4, seed=i) for i in range(2))
        well.forward([datum(4)]).result(30)
        read = AdapterPool._read

        def broken(pool, resident):
            if resident.model_id == lost.model_id:
                raise OSError(5, "Input/output error")
            read(pool, resident)

        assert engine.resident(lost.model_id).place == "disk"
        with monkeypatch.context() as patch:
            patch.setattr(AdapterPool, "_read", broken)
            with pytest.raises(ServerError, match="Input/output error; the adapter is as it was before"):
                lost.optim_step(AdamParams()).result(30)
            before = engine.create_adapter(rank=4).forward_backward([datum(300)])  # so that the next two share a micro-batch
            doomed, fine = lost.forward_backward([datum(6)]), well.forward_backward([datum(6)])
            with pytest.raises(ServerError, match="Input/output error"):
                doomed.result(30)
            assert fine.result(30).loss > 0 and before.result(30).loss > 0
        assert well.optim_step(AdamParams()).result(30).metrics["grad_norm"] > 0
        assert lost.optim_step(AdamParams()).result(30).metrics["grad_norm"] == 0


def test_an_adapter_unloaded_while_it_is_on_disk_says_so(model, tmp_path):
    one, two = resident(model, "one"), resident(model, "two")
    pool = AdapterPool(device_bytes=one.nbytes, directory=tmp_path)
    pool.add(one)
    pool.add(two)
    pool.remove(one)
    with pytest.raises(NotFound, match="adapter 'one' was unloaded before this request ran"):
        pool.acquire(one)
    pool.release(one)
    assert pool.held == {"device": two.nbytes, "host": 0, "disk": 0}
