"""A model spread over a group of devices: the same bits, and every tensor where its stage is.

There is no second device here, so two stand-ins: "cpu:0" and "cpu:1", which hold the same memory but which torch copies between, with a
dispatch mode that knows on which of them every tensor would lie; and "meta", whose tensors say so themselves but hold nothing.
"""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import spindle.compute.model as model_room
from spindle.compute.adapter import AdapterWeights
from spindle.compute.attention import Packing
from spindle.compute.groups import group_devices
from spindle.compute.model import BaseModel
from spindle.compute.worker import DeviceWorker
from spindle.errors import UserError
from spindle.sampling import Sampler, SampleRequest
from spindle.sampling.kv import Bank, DecodeRows, PromptKV, StepCache
from spindle.types import AdamParams, LoraConfig, SamplingParams
from tests.compute.helpers import Request, pack, random_adapter, random_item
from tests.tiny import tiny_gemma3, tiny_llama, tiny_mistral, tiny_phi3, tiny_qwen3_moe

TWO = ("cpu:0", "cpu:1")
THREE_LAYERS = {
    "llama": lambda: tiny_llama(num_hidden_layers=3),
    "llama_tied": lambda: tiny_llama(num_hidden_layers=3, tied=True),
    "mistral_sliding": lambda: tiny_mistral(num_hidden_layers=3),
    "phi3_fused": lambda: tiny_phi3(num_hidden_layers=3),
    "gemma3": lambda: tiny_gemma3(num_hidden_layers=3, layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
    "qwen3_moe": lambda: tiny_qwen3_moe(num_hidden_layers=3),
}


class Places(TorchDispatchMode):
    """Tracks on which of "cpu:0", "cpu:1", … a float tensor would lie; an operation on tensors of two of them fails.

    What is made or copied there with a device named lies there, what comes out of an operation where its inputs lie.
    """

    def __init__(self) -> None:
        super().__init__()
        self.of_storage: dict[int, int] = {}
        self.alive: list[torch.Tensor] = []  # an address is a tensor's own only while it lives

    def place(self, x: torch.Tensor) -> int | None:
        return self.of_storage.get(x.untyped_storage().data_ptr()) if x.is_floating_point() and x.dim() and x.numel() else None

    def put(self, x: torch.Tensor, place: int) -> None:
        if x.is_floating_point() and x.dim() and x.numel():
            self.alive.append(x)
            self.of_storage[x.untyped_storage().data_ptr()] = place

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        places = {place for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and (place := self.place(x)) is not None}
        out = func(*args, **kwargs)
        device = kwargs.get("device")
        if device is not None and device.index is not None:
            places = {device.index}
        elif (
            func is torch.ops.aten.copy_.default and self.place(out) is not None
        ):  # the one way over without a device: into what lies there
            return out
        assert len(places) <= 1, f"{func} on tensors of devices {places}"
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and places:
                self.put(x, *places)
        return out


class _Cross(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, source, target, crossings):
        ctx.way, ctx.crossings = (target, source), crossings
        crossings.append((source.index, target.index))
        return x.to(target)

    @staticmethod
    def backward(ctx, dy):
        ctx.crossings.append(tuple(device.index for device in ctx.way))
        return dy.to(ctx.way[1]), None, None, None


@pytest.fixture
def crossings(monkeypatch):
    """(from, to) of every border that hidden states, or their gradients, crossed. torch's own way back is blind to "cpu:0"."""
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(model_room, "move", lambda x, device: _Cross.apply(x, torch.device("cpu", device.index - 1), device, seen))
    return seen


def expected_stage(name: str, per_device: int, count: int) -> int:
    layer = re.search(r"layers\.(\d+)\.", name)
    return int(layer[1]) // per_device if layer else 0 if "embed_tokens" in name else count - 1


def placed(base: BaseModel, adapters) -> Places:
    """A mode that knows where the weights lie, told by the names of parameters, and that adapters lie on the first device."""
    mode = Places()
    for name, p in base.model.named_parameters():
        mode.put(p, expected_stage(name, base.layers_per_device, len(base.devices)))
    for adapter in adapters:
        mode.put(adapter.params, 0)
    return mode


def requests(adapters, step=0):
    rng = np.random.default_rng(step)
    return [
        Request(adapters[0], [random_item(rng, 30), random_item(rng, 5)]),
        Request(adapters[1], [random_item(rng, 40, 2)]),
        Request(adapters[0], [random_item(rng, 9)], backward=False),
        Request(adapters[1], [random_item(rng, 21, names=("logprobs", "advantages"))], "importance_sampling"),
    ]


def train(worker, steps=3):
    """Answers of each step, and the parameters after the last."""
    adapters = [random_adapter(worker.model, LoraConfig(rank=rank), seed=rank) for rank in (4, 2)]
    answers = []
    for step in range(steps):
        results = worker.run(pack(requests(adapters, step)))
        answers.append([(r.logprobs, r.metrics["loss:sum"], None if r.grad is None else r.grad.clone()) for r in results])
        for result in results:
            if result.grad is not None:
                worker.accumulate(result.segment.adapter, result.grad)
        for adapter in adapters:
            worker.optim_step([adapter], AdamParams(learning_rate=1e-2))
    return answers, [adapter.params for adapter in adapters]


@pytest.mark.parametrize("activation_budget", [None, 0])
@pytest.mark.parametrize("name", THREE_LAYERS)
def test_the_same_bits_as_on_one_device(name, activation_budget):
    base = BaseModel.load(THREE_LAYERS[name]())
    alone, params = train(DeviceWorker(base, activation_budget))
    spread = base.replica(TWO, 2)
    spread.check()
    answers, spread_params = train(DeviceWorker(spread, activation_budget))
    for one, other in zip(itertools.chain(*alone), itertools.chain(*answers), strict=True):
        assert torch.equal(one[0], other[0]) and one[1] == other[1]
        assert (one[2] is None and other[2] is None) or torch.equal(one[2], other[2])
    assert all(map(torch.equal, params, spread_params))


@pytest.mark.parametrize("name", ["llama_tied", "gemma3", "qwen3_moe"])
@pytest.mark.parametrize("activation_budget", [None, 0])
def test_every_operation_stays_on_its_stage(name, activation_budget, crossings):
    base = BaseModel.load(THREE_LAYERS[name]())
    spread = base.replica(("cpu:0", "cpu:1", "cpu:2"), 1)
    worker = DeviceWorker(spread, activation_budget)
    adapters = [random_adapter(spread, LoraConfig(rank=rank), seed=rank) for rank in (4, 2)]
    with placed(spread, adapters) as mode:
        results = worker.run(pack(requests(adapters)))
        assert crossings == [(0, 1), (1, 2), (2, 1), (1, 0)], "hidden states cross each border once, their gradient once back"
        for result in results:
            assert result.grad is None or mode.place(result.grad) == 0
            assert result.grad is None or all(result.grad[start:stop].any() for start, stop in ranges(result.grad, adapters))
        for adapter in adapters:
            parts = adapter.weights().on(spread.devices)
            assert [mode.place(part.params) for part in parts] == [0, 1, 2]
            for path in adapter.layout.pairs:
                (stage,) = [i for i, part in enumerate(parts) if path in part.matrices]
                assert stage == expected_stage(f"{path}.", 1, 3)


def ranges(grad, adapters):
    """The part of each stage in a flat gradient of one of the adapters."""
    layout = next(adapter.layout for adapter in adapters if adapter.layout.numel == len(grad))
    return [(start, start + part.numel) for start, part in layout.parts]


def test_the_check_of_places_can_fail(crossings, monkeypatch):
    spread = BaseModel.load(tiny_llama(tied=True)).replica(TWO, 1)
    adapters = [random_adapter(spread, LoraConfig(rank=rank)) for rank in (4, 2)]
    with pytest.raises(AssertionError, match="on tensors of devices"), placed(spread, adapters), monkeypatch.context() as patch:
        left = lambda self, devices: tuple(AdapterWeights(p, self.params[s : s + p.numel]) for s, p in self.layout.parts)  # noqa: E731
        patch.setattr(AdapterWeights, "on", left)
        DeviceWorker(spread).run(pack(requests(adapters)))
    with pytest.raises(AssertionError, match="on tensors of devices"), placed(spread, adapters) as mode:
        mode.put(spread.head.weight, 0)  # as if the tied head had stayed with the embeddings
        DeviceWorker(spread).run(pack(requests(adapters)))


def test_stages_on_a_device_that_holds_nothing():
    """Weights, hidden states and adapters of the second stage are on "meta", where torch itself refuses what lies elsewhere."""
    base = BaseModel.load(tiny_gemma3())
    spread = base.replica(("cpu", "meta"), 1)
    assert {(name, p.device.type) for name, p in spread.model.named_parameters()} == {
        (name, ("cpu", "meta")[expected_stage(name, 1, 2)]) for name, _ in (*base.model.named_parameters(), ("lm_head.weight", None))
    }
    adapter = random_adapter(spread, LoraConfig(rank=4))
    tokens = torch.arange(30)
    groups = [(0, 10, adapter.weights(), torch.empty(adapter.layout.numel)), (10, 30, adapter.snapshot())]
    hidden = spread.hidden(tokens, tokens, Packing([30]), groups)
    assert hidden.device.type == "meta" and hidden.shape == (30, 64) and hidden.requires_grad
    assert spread.logits(hidden.detach(), groups).device.type == "meta"
    assert all(x.device.type == "cpu" for x in (*base.model.parameters(), adapter.params))


def test_keys_and_values_lie_with_their_layer():
    spread = BaseModel.load(tiny_mistral(num_hidden_layers=3)).replica(("cpu", "meta"), 2)
    prompt = PromptKV(30)
    tokens = torch.arange(30)
    with torch.no_grad():
        spread.hidden(tokens, tokens, Packing([30], StepCache([], [(prompt, 0, 30)])))
        assert [t.device.type for t in (*prompt.keys, *prompt.values)] == ["cpu", "cpu", "meta"] * 2
        bank = Bank(64)
        bank.add(np.array([3, 5]), prompt.keys, prompt.values, 30)
        for total, rows in ((2, np.arange(2)), (7, np.array([6, 0]))):  # alone, and beside the rows of another prompt
            other = PromptKV(5)
            step = StepCache([DecodeRows.of(bank, rows, np.array([30, 30]), total)], [(other, 1, 6)] if total > 2 else [])
            fed = torch.full((total,), 30)
            spread.hidden(fed, fed, Packing([1] * 2 if total == 2 else [1, 5, 1], step))
        assert [t.device.type for t in (*bank.keys, *other.values)] == ["cpu", "cpu", "meta"] * 2


def test_samples_of_a_spread_model(crossings):
    base = BaseModel.load(tiny_llama(num_hidden_layers=3))
    spread = base.replica(TWO, 2)
    adapter = random_adapter(spread, LoraConfig(rank=4))
    twin = random_adapter(base, LoraConfig(rank=4))
    prompt = np.arange(20)

    def sample(model, weights, watch=lambda bank: None):
        sampler = Sampler(model)
        asked = [
            SampleRequest(
                prompt=prompt[: 20 - 3 * i], params=SamplingParams(max_tokens=9, temperature=t, seed=3), num_samples=2, snapshot=w
            )
            for i, (t, w) in enumerate(itertools.product((0.0, 1.0), (None, weights)))
        ]
        futures = [sampler.submit(one) for one in asked]
        while sampler.has_work():
            sampler.step()
            for bank in sampler._banks.values():
                if bank.count:
                    watch(bank)
        return [(s.tokens.tolist(), s.logprobs.tolist()) for f in futures for s in f.result(0).sequences]

    want, seen = sample(base, twin.snapshot()), set()
    with placed(spread, [adapter]) as mode:
        weights = adapter.snapshot()
        got = sample(spread, weights, lambda bank: seen.add(tuple(mode.place(t) for t in (*bank.keys, *bank.values))))
        assert set(crossings) == {(0, 1)} and seen == {(0, 0, 1, 0, 0, 1)}
        assert [mode.place(part.params) for part in weights.on(spread.devices)] == [0, 1]
    assert got == want


def test_copies_of_parts_follow_the_parameters():
    spread = BaseModel.load(tiny_llama()).replica(TWO, 1)
    adapter = random_adapter(spread, LoraConfig(rank=4))
    first = adapter.weights().on(spread.devices)
    assert adapter.weights().on(spread.devices) is first
    with torch.no_grad():
        adapter.params.add_(1.0)
    second = adapter.weights().on(spread.devices)
    assert second is not first
    assert torch.equal(torch.cat([part.params for part in second]), adapter.params)
    assert [part.layout.numel for part in second] == [len(part.params) for part in second] and len(second[1].params)
    adapter.drop_copies()
    assert adapter.weights().on(spread.devices) is not second


def test_an_adapter_of_the_unembedding_alone():
    base = BaseModel.load(tiny_llama())
    lora = LoraConfig(rank=4, train_attn=False, train_mlp=False)
    grads = []
    for model in (base, base.replica(TWO, 1)):
        adapter = random_adapter(model, lora)
        item = random_item(np.random.default_rng(0), 20)
        grads.append(DeviceWorker(model).run(pack([Request(adapter, [item])]))[0].grad)
    assert grads[0].any() and torch.equal(*grads)


def test_replicas_share_tensors_and_nothing_else():
    base = BaseModel.load(tiny_llama(tied=True))
    twin, third = base.replica("cpu"), base.replica(("cpu", "cpu"))
    for other in (twin, third):
        assert all(a is b for a, b in zip(base.model.parameters(), other.model.parameters(), strict=True))
        assert other.head.weight is base.head.weight
    base.checkpoint_activations(True)
    after = base.replica("cpu")
    assert [m._layers[0].gradient_checkpointing for m in (base, twin, third, after)] == [True, False, False, False]
    adapter = random_adapter(base, LoraConfig(rank=4))
    item = random_item(np.random.default_rng(0), 20)
    one, other = (DeviceWorker(m, 0).run(pack([Request(adapter, [item])]))[0].grad for m in (base, after))
    assert torch.equal(one, other)


def test_layers_that_cannot_be_spread_so():
    base = BaseModel.load(tiny_llama(num_hidden_layers=3))
    with pytest.raises(UserError, match="layers_per_device: got 1 for a group of 2 devices; 3 layers need 3"):
        base.replica(TWO, 1)
    cpu = torch.device("cpu")
    for wrong in (0, 4, 1.5):
        with pytest.raises(UserError, match=f"layers_per_device: got {wrong}; allowed is a whole number from 1 to 3"):
            group_devices(base, [cpu], wrong)
    with pytest.raises(UserError, match="devices: got 3 with layers_per_device 2; 3 layers need groups of 2 devices, so name a multiple"):
        group_devices(base, [cpu] * 3, 2)
    base._layers.pop()
    with pytest.raises(UserError, match="model type 'llama' cannot be spread over devices: it is more than one row of decoder layers"):
        base.replica(TWO, 2)


def test_groups_by_memory():
    """Four stand-ins for GPUs; the model is 4 layers between two matrices of 2048 x 64. Weights may take 4/5 of the room."""
    base = BaseModel.load(tiny_llama(num_hidden_layers=4))
    gpus = [torch.device("cpu", i) for i in range(4)]
    layer = sum(p.nbytes for p in base._layers[0].parameters())
    matrix = base.head.weight.nbytes
    whole = 4 * layer + 2 * matrix

    def groups(count, room, per_device=None):
        return group_devices(base, gpus[:count], per_device, lambda device: room)

    single = ([(gpu,) for gpu in gpus], 4)
    assert groups(4, 1.3 * whole) == single and groups(4, 1.2 * whole)[1] == 2
    assert groups(4, 1.01 * whole, 4) == single  # said so: no margin is kept
    assert groups(4, 1.3 * (2 * layer + matrix)) == ([tuple(gpus[:2]), tuple(gpus[2:])], 2)
    assert groups(4, 1.3 * (layer + matrix)) == ([tuple(gpus)], 1)
    with pytest.raises(UserError, match=r"devices: llama does not fit: with 1 of 4 layers on each device, cpu:[03] would hold 0\.0"):
        groups(4, matrix)
    with pytest.raises(UserError, match="does not fit: with 4 of 4 layers on each device, cpu:0 would hold"):
        groups(1, 1.2 * whole)
