"""Counter-based noise: a draw is a pure function of (seed, sample, index), so it cannot depend on the neighbours in a batch."""

from __future__ import annotations

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_SILVER = np.uint64(0xD1B54A32D192ED03)


def _mix(x: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64 (public domain, Steele, Lea and Flood 2014): uint64 -> uint64, a bijection."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniform(seed: np.ndarray, sample: np.ndarray, index: np.ndarray) -> np.ndarray:
    """One draw from [0, 1) for every (seed [n] uint64, sample [n], index [n]): [n] float64. The arrays may broadcast."""
    with np.errstate(over="ignore"):
        x = _mix(np.asarray(seed, np.uint64) + _GOLDEN)
        x = _mix(x ^ (np.asarray(sample).astype(np.uint64) * _SILVER + _GOLDEN))
        x = _mix(x ^ (np.asarray(index).astype(np.uint64) * _GOLDEN + _SILVER))
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53
