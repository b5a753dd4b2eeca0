"""Losses: each is the plain sum over cells of what its file says. A loss is one file and one line here.

A loss function gets p [cells] float32 logprobs (the autograd leaf), its inputs by name [cells], the request's complete config, and the
``Sequences`` the cells belong to, and returns the loss of each cell [cells]. It knows nothing of batches.
"""

from __future__ import annotations

from spindle.losses import cispo, cross_entropy, dro, gspo, importance_sampling, ppo, stable_reinforce
from spindle.losses.base import Loss, Sequences
from spindle.losses.custom import CustomLimits, check_custom_owner, create_custom
from spindle.losses.registry import check, get, names, register

__all__ = ["CustomLimits", "Loss", "Sequences", "check", "check_custom_owner", "create_custom", "get", "names", "register"]

register(cross_entropy.LOSS)
register(importance_sampling.LOSS)
register(ppo.LOSS)
register(cispo.LOSS)
register(dro.LOSS)
register(gspo.LOSS)
register(stable_reinforce.LOSS)
