"""dro: sum of -(A p - beta/2 (p - q)^2) w. The hosted service's beta is not public; ours is 0.05."""

from __future__ import annotations

from spindle.losses import ratio
from spindle.losses.base import Loss


def dro(p, inputs, config, sequences):
    penalty = 0.5 * config["beta"] * (p - inputs["logprobs"]).square()
    return -(inputs["advantages"] * p - penalty) * inputs["weights"]


def check_beta(config):
    if config["beta"] < 0:
        raise ValueError(f"beta must be at least 0, got {config['beta']}")


LOSS = Loss("dro", dro, ratio.REQUIRED, ratio.OPTIONAL, defaults={"beta": 0.05}, check_config=check_beta, metrics=ratio.metrics)
