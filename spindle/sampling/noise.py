"""Counter-based noise: a draw is a pure function of (seed, sample, index, token), so it cannot depend on the neighbours in a batch."""

from __future__ import annotations

import numpy as np
import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_SILVER = np.uint64(0xD1B54A32D192ED03)


def _mix(x: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64 (Steele, Lea and Flood 2014): uint64 -> uint64, a bijection."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def keys(seed: np.ndarray | np.uint64, sample: np.ndarray, index: np.ndarray) -> np.ndarray:
    """64 random bits for every (seed uint64, sample, index): uint64 of their broadcast shape."""
    with np.errstate(over="ignore"):
        x = _mix(np.asarray(seed, np.uint64) + _GOLDEN)
        x = _mix(x ^ (np.asarray(sample).astype(np.uint64) * _SILVER + _GOLDEN))
        return _mix(x ^ (np.asarray(index).astype(np.uint64) * _GOLDEN + _SILVER))


def uniform(seed: np.ndarray | np.uint64, sample: np.ndarray, index: np.ndarray) -> np.ndarray:
    """One draw from [0, 1) for every (seed, sample, index): float64 of their broadcast shape."""
    return (keys(seed, sample, index) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def gumbel(key: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise of every (key, token): key [n] int64 (any bits), ids [V] or [n, w] token ids -> [n, V] or [n, w] float32.

    The mixing is a 32-bit xorshift-multiply hash with the two halves of the key put in at its start and its middle.
    """
    low, high = (key & 0x7FFFFFFF).int()[:, None], (key >> 32).int()[:, None]
    x = ids.int() * 0x2545F491 + low  # int32, wraps
    x ^= (x >> 16) & 0xFFFF
    x *= 0x7FEB352D
    x ^= high
    x ^= (x >> 15) & 0x1FFFF
    x *= 0x846CA68B - (1 << 32)
    x ^= (x >> 16) & 0xFFFF
    x &= 0x7FFFFFFF
    uniform = x.float().add_(0.5).mul_(2.0**-31)  # float32 keeps small values exact, and they decide
    return uniform.neg_().log1p_().neg_().log_().neg_()
