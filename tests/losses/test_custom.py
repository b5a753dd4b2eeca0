"""Server-run custom losses: graphs as the SDK traces and encodes them, against the same function client-side; and what is refused."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from tinker.lib.public_interfaces.custom_loss import encode_graph, trace_loss

from spindle import losses
from spindle.compute.model import BaseModel
from spindle.compute.worker import DeviceWorker
from spindle.errors import InvalidRequest
from spindle.losses.graph import Graph
from spindle.types import LoraConfig
from tests.compute.helpers import Item, Request, pack, random_adapter, random_item
from tests.tiny import tiny_llama


def create(fn, **ranks):
    handle = trace_loss(fn, ranks, "session")
    inputs = [i.model_dump() for i in handle.inputs]
    return losses.create_custom(handle.name, inputs, encode_graph(handle).model_dump(), owner="session")


def mixture(logprobs, logprobs_old, advantages):
    ratio = torch.exp((logprobs - logprobs_old).clamp(-2, 2))
    kept = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    entropy = torch.nn.functional.softplus(-logprobs).sum() * 0.1
    loss = -kept.sum() + entropy / logprobs.shape[0] + torch.where(advantages > 0, logprobs, 0.5 * logprobs).mean()
    return loss, {"custom/ratio:mean": ratio.mean(), "custom/kept:sum": kept.sum()}


@pytest.fixture(scope="module")
def worker():
    return DeviceWorker(BaseModel.load(tiny_llama()))


def test_equals_the_function(worker):
    loss_id = create(mixture, logprobs=1, logprobs_old=1, advantages=1)
    adapter = random_adapter(worker.model, LoraConfig(rank=4))
    rng = np.random.default_rng(0)
    items = [random_item(rng, n, names=("logprobs_old", "advantages")) for n in (5, 30)]
    result = worker.run(pack([Request(adapter, items, "custom", {"loss_id": loss_id})]))[0]
    assert result.error is None
    leaf = result.logprobs.clone().requires_grad_()
    total, ratios, kept = 0, [], 0.0
    for i, p in zip(items, leaf.split([5, 30]), strict=True):
        loss, metrics = mixture(p, *(torch.from_numpy(i.inputs[n]) for n in ("logprobs_old", "advantages")))
        total, kept = total + loss, kept + metrics["custom/kept:sum"].item()
        ratios.append(metrics["custom/ratio:mean"].item())
    want = {"loss:sum": total.item(), "custom/ratio:mean": sum(ratios) / 2, "custom/kept:sum": kept}
    assert result.metrics == pytest.approx(want, rel=1e-5)
    weights = -torch.autograd.grad(total, leaf)[0].numpy()  # the same gradient through cross_entropy
    parts = np.split(weights, [5])
    linear = [Item(i.tokens, i.targets, {"weights": w}) for i, w in zip(items, parts, strict=True)]
    other = worker.run(pack([Request(adapter, linear)]))[0].grad
    assert (result.grad - other).norm() <= 1e-5 * other.norm()


def test_rank_two_and_errors_at_run_time(worker):
    adapter = random_adapter(worker.model, LoraConfig(rank=4))
    item = random_item(np.random.default_rng(1), 6, 3, names=())
    good = create(lambda logprobs: (-(logprobs.softmax(-1) * logprobs).sum(), {}), logprobs=2)
    assert worker.run(pack([Request(adapter, [item], "custom", {"loss_id": good})]))[0].error is None
    for loss_id, text in (
        (create(lambda logprobs: (logprobs.sum(), {}), logprobs=1), "target_tokens has shape [N, K] but loss"),
        (create(lambda logprobs: (logprobs * 2, {}), logprobs=2), "the loss must be a scalar, got shape [6, 3]"),
        (create(lambda logprobs: (logprobs.view(7).sum(), {}), logprobs=2), "node 'view' (view)"),
        (create(lambda logprobs: (logprobs.repeat(1 << 30).sum(), {}), logprobs=2), "custom loss: node 'repeat' (repeat)"),
    ):
        result = worker.run(pack([Request(adapter, [item], "custom", {"loss_id": loss_id})]))[0]
        assert text in str(result.error)


def node(op, name, target, *args, **kwargs):
    return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": kwargs}


START = node("placeholder", "logprobs", "logprobs")
END = node("output", "output", "output", {"tuple": [{"ref": "x"}, {"dict": {}}]})


@pytest.mark.parametrize(
    ("middle", "text"),
    [
        (node("call_function", "x", "os.system", "ls"), "node 'x' calls 'os.system', which is not among the allowed operations"),
        (node("call_function", "x", "torch.load", "f"), "calls 'torch.load'"),
        (node("call_function", "x", "builtins.eval", "1"), "calls 'builtins.eval'"),
        (node("call_method", "x", "numpy", {"ref": "logprobs"}), "calls 'numpy'"),
        (node("call_method", "x", "add_", {"ref": "logprobs"}, 1), "calls 'add_'"),
        (node("call_method", "x", "register_hook", {"ref": "logprobs"}), "calls 'register_hook'"),
        (node("call_function", "x", "torch.add", 1, 2, out={"ref": "logprobs"}), "the argument 'out' is not allowed"),
        (node("get_attr", "x", "weight"), "node 'x' is a 'get_attr'"),
        (node("call_module", "x", "net"), "node 'x' is a 'call_module'"),
        (node("call_method", "x", "sum", {"ref": "later"}), "refers to 'later', which is no earlier node"),
        (node("call_method", "x", "sum", {"ref": "a", "tuple": []}), "an argument object must have one key"),
        (node("call_method", "x", "sum", {"module": "os"}), "an argument of kind 'module' is not allowed"),
        (node("call_method", "x", "to", {"ref": "logprobs"}, {"dtype": "complex64"}), "dtype 'complex64' is not allowed"),
        (node("call_method", "logprobs", "sum", {"ref": "logprobs"}), "node 1 has the name 'logprobs'; every node needs a name of its own"),
    ],
)
def test_graphs_that_are_refused(middle, text):
    with pytest.raises(InvalidRequest) as caught:
        Graph([START, middle, END], ["logprobs"])
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("middle", "text"),
    [
        (node("call_function", "x", "getattr", {"ref": "logprobs"}, "__class__"), "attribute '__class__' is not allowed"),
        (node("call_function", "x", "operator.mul", [0], 1 << 40), "list is not allowed here"),
        (node("call_function", "x", "operator.pow", 10, 1 << 40), "exponent"),
        (node("call_function", "x", "torch.zeros", 1 << 40), "makes 1099511627776 elements; at most 16777216 are allowed"),
        (node("call_method", "x", "expand_as", {"ref": "logprobs"}, 3), "node 'x' (expand_as)"),
        (node("call_function", "x", "torch.zeros", 3, device="cuda:7"), "the loss must be a scalar"),
        (node("call_function", "x", "torch.zeros", 3, device={"device": "cuda:7"}), "the loss must be a scalar"),
    ],
)
def test_graphs_that_fail_when_run(middle, text):
    with pytest.raises(InvalidRequest) as caught:
        Graph([START, middle, END], ["logprobs"]).run({"logprobs": torch.zeros(4)})
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("inputs", "graph", "text"),
    [
        ([{"name": "advantages", "rank": 1}], {}, "1 to 16 distinct names, logprobs first"),
        ([{"name": "logprobs", "rank": 0}], {}, "inputs: logprobs has rank 0"),
        ([{"name": "logprobs", "rank": 1}, {"name": "a", "rank": 2}], {}, "inputs: a has rank 2"),
        ([{"name": "logprobs", "rank": 1}], {"format": 2}, "graph: format 2 is not known; 1 is"),
        ([{"name": "logprobs", "rank": 1}], {"nodes": [7]}, "graph: a node has fields of the wrong type"),
        (
            [{"name": "logprobs", "rank": 1}],
            {"nodes": [START | {"args": [{"ref": []}]}, END]},
            "graph: a node has fields of the wrong type",
        ),
        ([{"name": "logprobs", "rank": 1}], {"nodes": [START | {"kwargs": [1]}, END]}, "graph: a node has fields of the wrong type"),
        ([{"name": "logprobs", "rank": 1}], {"nodes": []}, "graph: has 0 nodes; 1 to 512 are allowed"),
        ([{"name": "logprobs", "rank": 1}], {"nodes": [START]}, "the last node, and only that, must be the output"),
        (
            [{"name": "logprobs", "rank": 1}, {"name": "a", "rank": 1}],
            {"nodes": [START, END | {"args": [1]}]},
            "its placeholders are ['logprobs']",
        ),
    ],
)
def test_what_create_refuses(inputs, graph, text):
    with pytest.raises(InvalidRequest) as caught:
        losses.create_custom("loss", inputs, graph)
    assert text in str(caught.value)


def test_the_same_loss_has_the_same_id():
    graph = {"format": 1, "nodes": [START, node("call_method", "x", "sum", {"ref": "logprobs"}), END]}
    inputs = [{"name": "logprobs", "rank": 1}]
    one = losses.create_custom("loss", inputs, graph, "a")
    assert one == losses.create_custom("loss", inputs, copy.deepcopy(graph), "a") != losses.create_custom("loss", inputs, graph, "b")
    assert losses.get("custom", {"loss_id": one}).required == ()
