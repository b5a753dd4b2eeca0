"""fill: every wire type, every layout, every size of block, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from spindle import codec
from spindle.codec import wire_pb2 as wire
from tests.codec.bodies import body, csr, dense, fill_all, raw_csr, simple, text_datum


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
        assert (got["tokens"] == tokens).all() and (got["positions"] == np.arange(n)).all()


@pytest.mark.parametrize("offset", range(0, 5))
@pytest.mark.parametrize("n", [1, 7, 33, 200_000])
def test_any_alignment_and_nothing_beside_it(n, offset):
    scanned = codec.scan(body(simple(n)), None, codec.Limits())
    integers = [np.full(n + 16, -9, np.int64) for _ in range(3)]
    weights = np.full(n + 16, -9, np.float32)
    inner = slice(offset, offset + n)
    codec.fill(scanned, [0], *(array[inner] for array in integers), {"weights": (weights[inner], None)})
    for array, expected in zip([*integers, weights], [np.arange(1, n + 1), np.arange(n), np.arange(n), np.ones(n)], strict=True):
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
    tokens, positions = np.zeros(3, np.int64), np.zeros(3, np.int64)
    codec.fill(scanned, [0, 1], tokens, positions, None)
    assert tokens.tolist() == [1, 2, 1]


def test_refusals():
    scanned = codec.scan(body(simple(3), text_datum([1], target_tokens=dense([1])), simple(2, logprobs=dense(np.ones((2, 2))))))

    def fill(indices=(0,), n=3, dtype=np.int64, inputs=None, positions=None):
        codec.fill(
            scanned,
            indices,
            np.zeros(n, dtype),
            np.zeros(n, np.int64) if positions is None else positions,
            np.zeros(n, np.int64),
            inputs or {},
        )

    fill()
    with pytest.raises(IndexError, match="datum 3 of 3"):
        fill([3])
    with pytest.raises(IndexError, match="datum -1 of 3"):
        fill([-1])
    with pytest.raises(ValueError, match="tokens has 2 items: the datums need 3"):
        fill(n=2)
    with pytest.raises(TypeError, match="tokens must be a writable contiguous int64 array"):
        fill(dtype=np.int32)
    with pytest.raises(TypeError, match="positions must be a writable contiguous int64 array"):
        fill(positions=np.zeros(6, np.int64)[::2])
    frozen = np.zeros(3, np.int64)
    frozen.flags.writeable = False
    with pytest.raises(TypeError, match="positions must be a writable"):
        fill(positions=frozen)
    with pytest.raises(TypeError, match="weights must be a writable contiguous float32 array"):
        fill(inputs={"weights": (np.zeros(3), None)})
    with pytest.raises(ValueError, match="datum 1: weights is missing and has no default"):
        fill([1], 1, inputs={"weights": (np.zeros(1, np.float32), None)})
    with pytest.raises(ValueError, match="datum 2: logprobs does not have the shape of target_tokens"):
        fill([2], 2, inputs={"logprobs": (np.zeros(2, np.float32), None)})
