"""fill: every wire type, every layout, every size of block, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spindle import codec
from spindle.codec import wire_pb2 as wire
from tests.codec.bodies import body, csr, dense, fill_all, raw_csr, read_tensor, simple, text_datum


def bfloat16(values) -> wire.Tensor:
    bits = torch.tensor(values, dtype=torch.bfloat16).view(torch.int16).numpy()
    return wire.Tensor(dense=bits.tobytes(), dtype=wire.DTYPE_BFLOAT16, shape=[len(values)])


@pytest.mark.parametrize(
    "tensor, expected",
    [
        (dense([0.5, -1.25, 3.0]), [0.5, -1.25, 3.0]),
        (dense([1, -2, 1 << 30]), [1, -2, 1 << 30]),
        (dense([1, -2, 7], "<i4"), [1, -2, 7]),
        (bfloat16([0.5, -3.0, 1e30]), torch.tensor([0.5, -3.0, 1e30], dtype=torch.bfloat16).tolist()),
    ],
    ids=["float32", "int64", "int32", "bfloat16"],
)
def test_types(tensor, expected):
    got = fill_all(codec.scan(body(simple(3, weights=tensor))), ["weights"])
    assert got["weights"].tolist() == np.float32(expected).tolist()


def test_csr_rows_need_not_be_sorted_and_may_be_empty():
    tensor = raw_csr([5, 6, 7], [0, 2, 2, 3], [2, 0, 1], [3, 3])
    got = fill_all(codec.scan(body(text_datum([1, 2, 3], target_tokens=tensor))))
    assert got["targets"].reshape(3, 3).tolist() == [[6, 0, 5], [0, 0, 0], [0, 7, 0]]


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 1.0])
@pytest.mark.parametrize("n, k", [(1, 1), (1, 256), (3000, 1), (1631, 5), (4096, 20), (257, 256), (70_000, 3)])
def test_csr_equals_dense(n, k, share):
    random = np.random.default_rng(n + k)
    listed = random.random((n, k)) < share
    targets, weights = random.integers(1, 1000, (n, k)) * listed, (random.random((n, k), np.float32) + 0.1) * listed
    tokens = random.integers(0, 1000, n)
    sparse = codec.scan(body(text_datum(tokens, target_tokens=csr(targets), weights=csr(weights))))
    full = codec.scan(body(text_datum(tokens, target_tokens=dense(targets), weights=dense(weights))))
    for scanned in (sparse, full):
        got = fill_all(scanned, ["weights"])
        assert (got["targets"] == targets.ravel()).all() and (got["weights"] == weights.ravel()).all()
        assert (got["tokens"] == tokens).all()


@st.composite
def sparse_datum(draw) -> wire.Datum:
    """Long enough for whole blocks of zeros; labels at a few places, -0.0 among the weights; dense or CSR, each for itself."""
    n, k = draw(st.integers(1, 400)), draw(st.integers(0, 3))
    shape = (n, k) if k else (n,)
    targets, weights = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
    for array, values in ((targets, st.integers(1, 2**31 - 1)), (weights, st.sampled_from([-0.0, 0.5, -3.0]))):
        for at in draw(st.lists(st.integers(0, array.size - 1), max_size=6)):
            array.reshape(-1)[at] = draw(values)
    inputs = {"target_tokens": draw(st.sampled_from([dense, csr] if k else [dense]))(targets)}
    if draw(st.booleans()):
        inputs["weights"] = draw(st.sampled_from([dense, csr] if k else [dense]))(weights)
    return text_datum(np.arange(n), **inputs)


@settings(max_examples=200, deadline=None)
@given(st.lists(sparse_datum(), min_size=1, max_size=4), st.sampled_from([0.0, -0.0, 1.0]), st.data())
def test_only_what_is_not_zero_is_written_and_cleared(data, default, drawn):
    scanned = codec.scan(body(*data))
    chosen = drawn.draw(st.lists(st.integers(0, len(data) - 1), max_size=6))
    got = fill_all(scanned, ["weights"], chosen, default)  # which fills zeroed memory too, and clears it
    for name, key in (("targets", "target_tokens"), ("weights", "weights")):
        expected = []
        for index in chosen:
            inputs = data[index].loss_fn_inputs
            absent = np.full(read_tensor(inputs["target_tokens"]).shape, default, np.float32)
            expected.append((read_tensor(inputs[key]) if key in inputs else absent).ravel())
        dtype = got[name].dtype
        want = np.concatenate(expected).astype(dtype) if expected else np.zeros(0, dtype)
        if any(key in data[index].loss_fn_inputs and data[index].loss_fn_inputs[key].WhichOneof("encoding") != "dense" for index in chosen):
            assert (got[name] == want).all()  # CSR does not list -0.0
        else:
            assert got[name].tobytes() == want.tobytes()


@pytest.mark.parametrize("place", [0, 31, 32, 1000, 1999])
def test_cells_that_are_written_lie_between_the_zeros(place):
    targets = np.zeros(2000, np.int64)
    targets[place] = 5
    scanned = codec.scan(body(text_datum(np.arange(2000), target_tokens=dense(targets)), text_datum([1], target_tokens=csr([[0, 7]]))))
    assert 1 <= scanned.written_cells[0] <= 32 + 2000 % 32 and scanned.written_cells[1] == 1
    assert fill_all(scanned)["targets"].nonzero()[0].tolist() == [place, 2001]
    assert codec.scan(body(text_datum([1, 2], target_tokens=dense([0, 0])))).written_cells.tolist() == [2]  # too short for a block


def test_memory_beside_the_written_cells_is_not_touched():
    targets = np.zeros((500, 2), np.int64)
    targets[300] = 9
    for tensor in (dense(targets), csr(targets)):
        scanned = codec.scan(body(text_datum(np.arange(500), target_tokens=tensor)))
        cells = np.full(1000, -1, np.int64)
        codec.fill(scanned, [0], np.zeros(500, np.int32), cells, zeroed=True)
        assert (cells[600:602] == 9).all() and (cells == -1).sum() >= 900
        codec.clear(scanned, [0], cells)
        assert not cells[600:602].any() and (cells == -1).sum() >= 900


@pytest.mark.parametrize("offset", range(0, 5))
@pytest.mark.parametrize("n", [1, 7, 33, 200_000])
def test_any_alignment_and_nothing_beside_it(n, offset):
    scanned = codec.scan(body(simple(n)), None, codec.Limits())
    tokens, targets, weights = (np.full(n + 16, -9, dtype) for dtype in (np.int32, np.int64, np.float32))
    inner = slice(offset, offset + n)
    codec.fill(scanned, [0], tokens[inner], targets[inner], {"weights": (weights[inner], None)})
    for array, expected in zip([tokens, targets, weights], [np.arange(1, n + 1), np.arange(n), np.ones(n)], strict=True):
        assert (array[inner] == expected).all()
        assert (array[:offset] == -9).all() and (array[offset + n :] == -9).all()


def test_default_of_an_optional_input_and_datums_twice():
    scanned = codec.scan(body(simple(2), text_datum([7], target_tokens=dense([8]))))
    got = fill_all(scanned, ["weights", "nobody_sent"], [1, 0, 1], default=0.5)
    assert got["weights"].tolist() == [0.5, 1, 1, 0.5] and got["nobody_sent"].tolist() == [0.5] * 4
    assert got["tokens"].tolist() == [7, 1, 2, 7]


def test_datums_without_targets_have_no_cells():
    scanned = codec.scan(body(text_datum([1, 2]), simple(1)))
    assert scanned.target_widths.tolist() == [-1, 0]
    got = fill_all(scanned)
    assert got["tokens"].tolist() == [1, 2, 1] and got["targets"].tolist() == [0]
    tokens = np.zeros(3, np.int32)
    codec.fill(scanned, [0, 1], tokens, None)
    assert tokens.tolist() == [1, 2, 1]


def test_refusals():
    scanned = codec.scan(body(simple(3), text_datum([1], target_tokens=dense([1])), simple(2, logprobs=dense(np.ones((2, 2))))))

    def fill(indices=(0,), n=3, dtype=np.int32, inputs=None, targets=None):
        codec.fill(scanned, indices, np.zeros(n, dtype), np.zeros(n, np.int64) if targets is None else targets, inputs or {})

    fill()
    with pytest.raises(IndexError, match="datum 3 of 3"):
        fill([3])
    with pytest.raises(IndexError, match="datum -1 of 3"):
        fill([-1])
    with pytest.raises(ValueError, match="tokens has 2 items: the datums need 3"):
        fill(n=2, targets=np.zeros(3, np.int64))
    with pytest.raises(TypeError, match="tokens must be a writable contiguous int32 array"):
        fill(dtype=np.int64)
    with pytest.raises(TypeError, match="targets must be a writable contiguous int64 array"):
        fill(targets=np.zeros(6, np.int64)[::2])
    frozen = np.zeros(3, np.int64)
    frozen.flags.writeable = False
    with pytest.raises(TypeError, match="targets must be a writable"):
        fill(targets=frozen)
    with pytest.raises(TypeError, match="weights must be a writable contiguous float32 array"):
        fill(inputs={"weights": (np.zeros(3), None)})
    with pytest.raises(ValueError, match="datum 1: weights is missing and has no default"):
        fill([1], 1, inputs={"weights": (np.zeros(1, np.float32), None)})
    with pytest.raises(ValueError, match="datum 2: logprobs does not have the shape of target_tokens"):
        fill([2], 2, inputs={"logprobs": (np.zeros(2, np.float32), None)})
