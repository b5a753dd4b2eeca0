"""Buffers of micro-batches: reused, bounded, zero where they say so."""

import numpy as np
import torch

from spindle.compute.buffers import KEPT, KEPT_BYTES, BufferPool


def test_buffers_are_used_again_when_they_are_long_enough_and_of_the_kind():
    pool = BufferPool(pinned=False)
    first = pool.take(10, 20, 40, written=20)
    assert not first.zeroed and pool.nbytes == 0
    assert (first.tokens.dtype, first.targets.dtype, first.inputs.dtype) == (torch.int32, torch.int64, torch.float32)
    pool.give_back(first)
    assert pool.nbytes == first.nbytes
    sparse = pool.take(10, 20, 40, written=1)
    assert sparse is not first and sparse.zeroed
    assert pool.take(10, 20, 40, written=20) is first
    pool.give_back(sparse)
    longer = pool.take(len(sparse.tokens) + 1, 20, 40, written=0)
    assert longer is not sparse and len(longer.tokens) > len(sparse.tokens)
    assert not (longer.targets.any() or longer.inputs.any())


def test_few_are_kept_and_few_bytes():
    pool = BufferPool(pinned=False)
    taken = [pool.take(10, 20, 40, written) for written in (0, 20) for _ in range(KEPT + 2)]
    for buffers in taken:
        pool.give_back(buffers)
    assert pool.nbytes == 2 * KEPT * taken[0].nbytes
    pool.give_back(pool.take(10, KEPT_BYTES // 8, 0, written=0))  # more than all that may be kept
    assert pool.nbytes <= 2 * KEPT * taken[0].nbytes
    assert np.asarray(pool.take(10, 20, 40, written=0).targets).sum() == 0
