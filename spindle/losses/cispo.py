"""cispo: sum of -sg(clip(r, low, high)) A p w, with r = exp(p - q) and sg the stop-gradient.

Servers disagree about the default bounds; ours are 0 and 4.
"""

from __future__ import annotations

from spindle.losses import ratio
from spindle.losses.base import Loss


def cispo(p, inputs, config, sequences):
    bound = ratio.clipped((p.detach() - inputs["logprobs"]).exp(), config)
    return -bound * inputs["advantages"] * p * inputs["weights"]


LOSS = Loss(
    "cispo",
    cispo,
    ratio.REQUIRED,
    ratio.OPTIONAL,
    defaults={"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    check_config=ratio.clip_range,
    metrics=ratio.metrics,
)
