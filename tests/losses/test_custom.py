"""Server-run custom losses: graphs as the SDK traces and encodes them, against the same function client-side; and what is refused."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from tinker.lib.public_interfaces.custom_loss import encode_graph, trace_loss

import spindle
from spindle import codec, losses
from spindle.compute.model import BaseModel
from spindle.compute.worker import DeviceWorker
from spindle.errors import InvalidRequest
from spindle.losses.base import Loss
from spindle.losses.custom import CustomLimits, CustomLosses
from spindle.losses.graph import ARGUMENT_WORK, MAX_ELEMENTS, NODE_WORK, Graph
from spindle.types import LoraConfig
from tests.compute.helpers import Item, Request, pack, random_adapter, random_item
from tests.tiny import tiny_llama


def create(fn, limits=CustomLimits(), **ranks):
    handle = trace_loss(fn, ranks, "session")
    inputs = [i.model_dump() for i in handle.inputs]
    return losses.create_custom(handle.name, inputs, encode_graph(handle).model_dump(), session="session", limits=limits)


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
        ([{"name": "logprobs", "rank": 0}], {}, "inputs: logprobs has rank 0; allowed are 1, 2"),
        ([{"name": "logprobs", "rank": 1}, {"name": "a", "rank": 3}], {}, "inputs: a has rank 3; allowed are 0, 1, 2"),
        ([{"name": "logprobs", "rank": 1}, {"name": "a", "rank": True}], {}, "inputs: a has rank True; allowed"),
        ([{"name": "logprobs", "rank": 1}, {"name": []}], {}, "1 to 16 distinct names"),
        ([{"name": "logprobs", "rank": 1}], {"nodes": [START], "padding": "x" * (1 << 17)}, "at most 131072 are allowed"),
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
    assert one.startswith("a:loss:")
    assert one == losses.create_custom("loss", inputs, copy.deepcopy(graph), "a") != losses.create_custom("loss", inputs, graph, "b")
    assert losses.get("custom", {"loss_id": one}).required == ()


@pytest.fixture(scope="module")
def engine(worker):
    with spindle.Engine(worker.model) as engine:
        yield engine


def datum(n, k=0, seed=0, **inputs):
    rng = np.random.default_rng(seed)
    return spindle.Datum(rng.integers(0, 2048, n), {"target_tokens": rng.integers(0, 2048, (n, k) if k else n), **inputs})


def wired(engine, adapter, seq_id, data, loss_id):
    """The same request as a body of the wire, for its answer."""
    return engine.submit(codec.encode_request(adapter.model_id, seq_id, data, "custom", {"loss_id": loss_id}))


def test_inputs_of_every_rank(engine):
    """Numbers, rows and tables beside logprobs of either rank, in array and in wire form, dense and CSR, against the function itself."""
    rng = np.random.default_rng(3)
    floats = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731

    def flat(logprobs, scale, row, table):
        return (logprobs * row * scale).sum() + (table.softmax(-1)[:, 0] * logprobs).sum(), {"custom/scale:mean": scale}

    def wide(logprobs, scale, row, table):
        return scale * (logprobs * row[:, None] + table).square().sum(), {"custom/row:sum": row.sum()}

    sparse = np.zeros((9, 4), np.float32)
    sparse[2, 1], sparse[7, 3] = 2.0, -1.0
    csr = torch.from_numpy(sparse).to_sparse_csr()
    for fn, rank, widths, tables in ((flat, 1, (0, 0, 0), 4), (wide, 2, (4, 2, 3), None)):
        loss_id = create(fn, logprobs=rank, scale=0, row=1, table=2)
        data = []
        for at, (n, k) in enumerate(zip((9, 1, 17), widths, strict=True)):
            table = csr if at == 0 else floats(n, tables or k)
            data.append(datum(n, k, at, scale=np.float32(0.5 + at), row=floats(n), table=table))
        adapter = engine.create_adapter(rank=4, seed=1)
        output = adapter.forward_backward(data, "custom", {"loss_id": loss_id}).result(60)
        total, metric = 0.0, []
        for one, found in zip(data, output.loss_fn_outputs, strict=True):
            given = one.loss_fn_inputs
            table = torch.from_numpy(sparse) if given["table"] is csr else torch.from_numpy(given["table"])
            row, scale = torch.from_numpy(given["row"]), torch.tensor(given["scale"])
            loss, metrics = fn(torch.from_numpy(found["logprobs"]), scale, row, table)
            total += loss.item()
            metric.append(next(iter(metrics.values())).item())
        assert output.loss == pytest.approx(total, rel=1e-5)
        key = "custom/scale:mean" if rank == 1 else "custom/row:sum"
        assert output.metrics[key] == pytest.approx(sum(metric) / (3 if rank == 1 else 1), rel=1e-5)
        twin = engine.create_adapter(rank=4, seed=1)
        answer = codec.decode_forward_backward(wired(engine, twin, 1, data, loss_id).result(60))
        assert answer.metrics == output.metrics


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ({"scale": np.ones(5, np.float32)}, "datum 0: scale has shape [N] but target_tokens has [N]; the loss takes one number"),
        ({"row": np.float32(1)}, "datum 0: row has shape [] but target_tokens has [N]; the loss takes [N]"),
        ({"table": np.ones(5, np.float32)}, "datum 0: table has shape [N] but target_tokens has [N]; the loss takes [N, K], K being"),
        ({"table": np.ones((5, 2), np.float32)}, "datum 1: table has shape [N, 3]"),
        ({"scale": np.int64(1)}, "datum 0: scale has an integer dtype"),
        ({"row": np.ones(4, np.float32)}, "row has shape [4]: its first size must be the datum's 5 tokens"),
        ({"scale": np.float32(np.inf)}, "scale: value 0 is inf: it must be finite"),
    ],
)
def test_inputs_of_the_wrong_rank(engine, inputs, text):
    loss_id = create(lambda logprobs, scale, row, table: (logprobs.sum() * scale, {}), logprobs=1, scale=0, row=1, table=2)
    good = {"scale": np.float32(1), "row": np.ones(5, np.float32), "table": np.ones((5, 3), np.float32)}
    adapter = engine.create_adapter(rank=4, seed=1)
    with pytest.raises(InvalidRequest) as caught:
        adapter.forward_backward([datum(5, **good | inputs), datum(5, **good)], "custom", {"loss_id": loss_id}).result(60)
    assert text in str(caught.value)
    assert adapter.forward_backward([datum(5, **good)], "custom", {"loss_id": loss_id}).result(60).loss < 0


def test_a_number_is_no_input_of_another_loss(engine):
    adapter = engine.create_adapter(rank=4, seed=1)
    with pytest.raises(InvalidRequest, match=r"datum 0: weights has shape \[\] but target_tokens has \[N\]"):
        adapter.forward_backward([datum(5, weights=np.float32(1))]).result(60)
    with pytest.raises(InvalidRequest, match="target_tokens is one number without a shape"):
        adapter.forward_backward([spindle.Datum([1, 2, 3], {"target_tokens": np.int64(1)})]).result(60)


def graph_of(*nodes):
    return Graph([START, *nodes, END], ["logprobs"])


def test_work_is_known_from_shapes():
    sum_ = node("call_method", "x", "sum", {"ref": "y"})
    one = graph_of(node("call_method", "y", "exp", {"ref": "logprobs"}), sum_).work([(100,)])
    assert one == 3 * NODE_WORK + 3 * ARGUMENT_WORK + 100 + 200 + 101  # the placeholder, exp, sum
    outer = [node("call_method", f"u{i}", "unsqueeze", {"ref": "logprobs"}, i) for i in (0, 1)]
    product = graph_of(*outer, node("call_function", "y", "torch.matmul", {"ref": "u1"}, {"ref": "u0"}), sum_).work([(100,)])
    assert product == 5 * NODE_WORK + 8 * ARGUMENT_WORK + 100 + 2 * 201 + 100 * 100 * 1 + 10001
    ordered = graph_of(node("call_method", "y", "argsort", {"ref": "logprobs"}), sum_).work([(1000,)])
    assert ordered == 3 * NODE_WORK + 3 * ARGUMENT_WORK + 1000 + (1000 + 10 * 1000) + 1001  # a logarithm more


@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        (  # an outer product of an outer product
            [
                node("call_function", "a", "operator.getitem", {"ref": "logprobs"}, {"tuple": [{"slice": [None] * 3}, None]}),
                node("call_function", "b", "operator.mul", {"ref": "a"}, {"ref": "logprobs"}),
                node("call_function", "c", "operator.getitem", {"ref": "b"}, {"tuple": [{"ellipsis": True}, None]}),
                node("call_function", "x", "operator.mul", {"ref": "c"}, {"ref": "logprobs"}),
            ],
            "node 'x' (operator.mul) makes 1073741824 elements",
        ),
        (  # a product whose result is small but whose operands are written out to the common batch
            [
                node("call_method", "a", "expand", {"ref": "logprobs"}, 1024, 1, 1, 1024),
                node("call_method", "b", "expand", {"ref": "logprobs"}, 1, 1024, 1, 1024),
                node("call_method", "c", "unsqueeze", {"ref": "b"}, -1),
                node("call_method", "d", "squeeze", {"ref": "c"}, 2),
                node("call_function", "x", "torch.matmul", {"ref": "a"}, {"ref": "d"}),
            ],
            f"broadcasts an operand to 1073741824 elements; at most {MAX_ELEMENTS} are allowed",
        ),
        ([node("call_function", "x", "torch.norm", {"ref": "logprobs"}, "nuc")], "the nuclear norm is not allowed"),
        ([node("call_function", "x", "torch.diff", {"ref": "logprobs"}, 1 << 40)], "n is 1099511627776; at most 16 is allowed"),
        ([node("call_function", "x", "torch.full", {"tuple": [1 << 62, 1 << 62]}, 1.0)], "node 'x' (torch.full)"),
        ([node("call_function", "x", "torch.arange", 1e18)], "node 'x' (torch.arange)"),
        ([node("call_method", "x", "mul", {"ref": "logprobs"}, 10**400)], "node 'x' (mul)"),
        ([node("call_function", "x", "operator.mul", 10**400, 2)], "is too large"),
        ([node("call_function", "x", "operator.pow", 1e308, 2)], "node 'x' (operator.pow)"),
        ([node("call_function", "x", "math.exp", 1e6)], "node 'x' (math.exp)"),
        ([node("call_method", "x", "tile", {"ref": "logprobs"}, {"tuple": [1 << 40]})], "node 'x' (tile)"),
        ([node("call_function", "x", "torch.nn.functional.pad", {"ref": "logprobs"}, [0, 1 << 50])], "node 'x' (torch.nn.functional.pad)"),
    ],
)
def test_nothing_large_is_made(nodes, text):
    """Refused on shapes alone, whatever the values are."""
    with pytest.raises(InvalidRequest) as caught:
        graph_of(*nodes).work([(1024,)])
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        ([node("call_method", "x", "sum", {"ref": "x"})], "refers to 'x', which is no earlier node"),  # itself
        (
            [node("call_method", "a", "add", {"ref": "x"}, 1), node("call_method", "x", "add", {"ref": "a"}, 1)],
            "refers to 'x', which is no earlier node",
        ),
        ([node("call_method", f"n{i}", "exp", {"ref": "logprobs"}) for i in range(600)], "has 602 nodes; 1 to 512 are allowed"),
        ([node("call_method", "x", "sum", [[[[[[[[[[0]]]]]]]]]])], "nested deeper than 8"),
    ],
)
def test_graphs_that_are_no_straight_line(nodes, text):
    with pytest.raises(InvalidRequest) as caught:
        graph_of(*nodes)
    assert text in str(caught.value)


def test_the_longest_chain_runs():
    chain = [node("call_method", f"n{i}", "mul", {"ref": f"n{i - 1}" if i else "logprobs"}, 1.0) for i in range(508)]
    graph = graph_of(*chain, node("call_method", "s", "sum", {"ref": "n507"}), node("call_method", "x", "neg", {"ref": "s"}))
    assert len(graph.nodes) == 512
    p = torch.full((5,), -2.0, requires_grad=True)
    loss, _ = graph.run({"logprobs": p})
    loss.backward()
    assert loss.item() == 10.0 and torch.equal(p.grad, torch.full((5,), -1.0))


def test_a_request_past_the_work_budget_fails_before_it_runs(engine):
    def pairs(logprobs):
        return (logprobs[:, None] - logprobs[None]).square().sum(), {}

    adapter, other = engine.create_adapter(rank=4, seed=1), engine.create_adapter(rank=4, seed=2)
    before = adapter.forward([datum(8)]).result(60)
    graph = Graph(encode_graph(trace_loss(pairs, {"logprobs": 1}, "s")).model_dump()["nodes"], ["logprobs"])
    most = 4 * graph.overhead + 100
    loss_id = create(pairs, CustomLimits(max_work=most), logprobs=1)
    assert np.isfinite(adapter.forward_backward([datum(8)], "custom", {"loss_id": loss_id}).result(60).loss)
    work = {n: graph.work([(n,)]) for n in (8, 200)}
    assert work[8] * 3 < most < work[8] * 4
    beside = other.forward_backward([datum(8)])
    for data, text in (
        ([datum(8), datum(200)], f"needs {work[8] + work[200]} element-operations or more ({work[200]} of them for a datum of 200 tokens)"),
        ([datum(8)] * 4, f"needs {work[8] * 4} element-operations"),
        ([datum(2)] * 9, f"({len(graph.nodes)} nodes on each of 9 datums); at most {most} are allowed: send fewer or shorter datums"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            adapter.forward_backward(data, "custom", {"loss_id": loss_id}).result(60)
        assert text in str(caught.value)
    assert np.isfinite(beside.result(60).loss)
    assert adapter.forward([datum(8)]).result(60).loss == before.loss


def test_a_loss_that_is_not_finite_leaves_the_adapter_alone(engine):
    def blown_up(logprobs):
        return (logprobs * -1e30).exp().sum(), {}

    adapter = engine.create_adapter(rank=4, seed=1)
    before = adapter.forward([datum(8)]).result(60)
    assert adapter.forward_backward([datum(8)], "custom", {"loss_id": create(blown_up, logprobs=1)}).result(60).loss == np.inf
    assert adapter.optim_step().result(60).metrics["step_skipped"] == 1
    after = adapter.forward([datum(8)]).result(60)
    assert np.array_equal(before.loss_fn_outputs[0]["logprobs"], after.loss_fn_outputs[0]["logprobs"])


def test_the_table_of_losses_is_fair():
    table, limits = CustomLosses(), CustomLimits(max_losses_per_owner=3, max_losses=6)
    add = lambda name, owner: table.add(name, Loss("custom", lambda *_: None), owner, limits)  # noqa: E731
    add("mine", "me")
    for i in range(5000):
        add(f"theirs{i}", "them")
    assert len(table) == 4 and table.find("mine") and table.find("theirs4997")
    add("theirs5000", "them")  # 4998 goes: 4997 was used since
    assert table.find("theirs4997")
    with pytest.raises(InvalidRequest, match="'theirs4998' is not known"):
        table.find("theirs4998")
    for owner in "abcdefgh":  # past the bound of all: who has most gives, down to one each
        add(owner, owner)
    assert len(table) == 6
    with pytest.raises(InvalidRequest):
        table.find("theirs4997")
    for bad in (None, 3, 1.5, ("mine",)):
        with pytest.raises(InvalidRequest, match="is not known"):
            table.find(bad)


def test_long_arguments_cost():
    short, long = (graph_of(node("call_function", "x", "torch.tensor", [0.5] * n)) for n in (1, 10_000))
    assert long.overhead - short.overhead == 9_999 * ARGUMENT_WORK
