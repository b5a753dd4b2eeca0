"""cross_entropy: sum of -w p. Weights of any sign and scale; absent: ones."""

from __future__ import annotations

from spindle.losses.base import Loss


def cross_entropy(p, inputs, config, sequences):
    return -inputs["weights"] * p


LOSS = Loss("cross_entropy", cross_entropy, optional={"weights": 1.0})
