"""importance_sampling: sum of -r A w, with r = exp(p - q)."""

from __future__ import annotations

from spindle.losses import ratio
from spindle.losses.base import Loss


def importance_sampling(p, inputs, config, sequences):
    r = ratio.exp_where(ratio.acting(inputs), p - inputs["logprobs"])
    return -r * inputs["advantages"] * inputs["weights"]


LOSS = Loss("importance_sampling", importance_sampling, ratio.REQUIRED, ratio.OPTIONAL, metrics=ratio.metrics)
