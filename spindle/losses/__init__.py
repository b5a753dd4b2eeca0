"""Losses: each is the plain sum over cells of what its file says. A loss is one file and one line here.

A loss function gets p [cells] float32 logprobs (the autograd leaf), its inputs by name [cells], the request's complete config, and
``sequences`` [s + 1], the cell offsets of the datums, and returns the loss of each cell [cells]. It knows nothing of batches.
"""

from __future__ import annotations

from spindle.losses import cross_entropy
from spindle.losses.base import Loss
from spindle.losses.metrics import combine
from spindle.losses.registry import check, get, names, register

__all__ = ["Loss", "check", "combine", "get", "names", "register"]

register(cross_entropy.LOSS)
