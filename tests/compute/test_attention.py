"""Packed attention against a plain softmax: windows, soft caps, grouped heads, and a cache that continues sequences."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from spindle.compute.attention import Packing, attend, packed_attention
from spindle.errors import ServerError

MODULE = SimpleNamespace(layer_idx=0)


def plain(q, k, v, scale, window, softcap):
    """[H, n, D], [Hkv, c, D]: every query against all it may see, in float64."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[0] // k.shape[0], 0) for x in (k, v))
    n, c = q.shape[1], k.shape[1]
    scores = q @ k.transpose(1, 2) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    at = torch.arange(c - n, c)[:, None]
    seen = (torch.arange(c) <= at) & (torch.arange(c) > at - (window or c))
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(0, 1)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("window", [None, 1, 6])
def test_whole_sequences(window, softcap):
    torch.manual_seed(0)
    lengths = [7, 7, 1, 20, 3, 3, 3]
    q = torch.randn(1, 4, sum(lengths), 16, requires_grad=True)
    k, v = (torch.randn(1, 2, sum(lengths), 16, requires_grad=True) for _ in range(2))
    out, _ = packed_attention(MODULE, q, k, v, scaling=0.3, sliding_window=window, softcap=softcap, packing=Packing(lengths))
    want = torch.cat(
        [plain(*(x[0] for x in one), 0.3, window, softcap) for one in zip(*(x.split(lengths, 2) for x in (q, k, v)), strict=True)]
    )
    assert (out[0] - want).abs().max() <= 1e-5
    seed = torch.randn_like(want)
    got = torch.autograd.grad((out[0] * seed).sum(), (q, k, v))
    for a, b in zip(got, torch.autograd.grad((want * seed).sum(), (q, k, v)), strict=True):
        assert (a - b).abs().max() <= 1e-4


class Cache:
    """Keeps everything in a dictionary and attends one sequence at a time."""

    def __init__(self):
        self.kept, self.lengths = {}, []

    def attend(self, layer, q, k, v, scale, window, softcap):
        out = []
        for s, rows in enumerate(zip(*(x.split(self.lengths) for x in (q, k, v)), strict=True)):
            new_q, *new = (x.transpose(0, 1)[None] for x in rows)
            old = self.kept.get((layer, s))
            self.kept[layer, s] = new if old is None else [torch.cat(pair, 2) for pair in zip(old, new, strict=True)]
            out.append(attend(new_q, *self.kept[layer, s], scale, window, softcap)[0].transpose(0, 1))
        return torch.cat(out)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("window", [None, 4])
def test_a_cache_continues_sequences(window, softcap):
    torch.manual_seed(1)
    cache, steps = Cache(), [[5, 1, 9], [1, 1, 1], [3, 2, 1], [1, 1, 1]]
    for lengths in steps:
        q = torch.randn(1, 4, sum(lengths), 16)
        k, v = (torch.randn(1, 2, sum(lengths), 16) for _ in range(2))
        cache.lengths = lengths
        out, _ = packed_attention(MODULE, q, k, v, scaling=0.3, sliding_window=window, softcap=softcap, packing=Packing(lengths, cache))
        for s, (got, rows) in enumerate(zip(out[0].split(lengths), q[0].split(lengths, 1), strict=True)):
            keys, values = cache.kept[0, s]
            assert (got - plain(rows, keys[0], values[0], 0.3, window, softcap)).abs().max() <= 1e-5


def test_runs_and_offsets():
    packing = Packing([4, 4, 2, 4])
    assert packing.runs == [(2, 4), (1, 2), (1, 4)]
    assert packing.cu_seqlens(torch.device("cpu")).tolist() == [0, 4, 8, 10, 14]


def test_what_is_refused():
    x = torch.zeros(1, 1, 1, 16)
    with pytest.raises(ServerError, match="was called without packing"):
        packed_attention(MODULE, x, x, x)
    with pytest.raises(ServerError, match="uses attention sinks, which packed attention does not support"):
        packed_attention(MODULE, x, x, x, packing=Packing([1]), s_aux=torch.zeros(1))
