"""ppo: sum of -min(r A, clip(r, low, high) A) w, with r = exp(p - q)."""

from __future__ import annotations

from spindle.losses import ratio
from spindle.losses.base import Loss


def ppo(p, inputs, config, sequences):
    return ratio.pessimistic(p - inputs["logprobs"], inputs, config)


LOSS = Loss(
    "ppo",
    ppo,
    ratio.REQUIRED,
    ratio.OPTIONAL,
    defaults={"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    check_config=ratio.clip_range,
    metrics=ratio.metrics,
)
