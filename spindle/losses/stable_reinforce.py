"""stable_reinforce. The hosted formula is not public; this one is ours. REINFORCE with a truncated importance weight and a pull towards
the sampler: sum over sampled tokens of (-sg(clip(r, low, high)) A p + kl_coeff/2 (p - q)^2) w, with r = exp(p - q).

q is what our sampler recorded for the sequence that the datum's spans name (input ``sampler_logprobs``, NaN where no span covers the
token), not what the client sends. Tokens without a record add nothing; one that has an advantage is an error.
"""

from __future__ import annotations

import torch

from spindle.errors import InvalidRequest
from spindle.losses import ratio
from spindle.losses.base import Loss


def stable_reinforce(p, inputs, config, sequences):
    q = inputs["sampler_logprobs"]
    sampled = ~q.isnan()
    if bool((~sampled & (inputs["advantages"] != 0) & (inputs["weights"] != 0)).any()):
        raise InvalidRequest("advantages: not 0 at a token that no sampled_tokens span covers; stable_reinforce has no record of it")
    log_ratio = p - torch.where(sampled, q, p.detach())
    bound = ratio.clipped(log_ratio.detach().exp(), config)
    loss = -bound * inputs["advantages"] * p + 0.5 * config["kl_coeff"] * log_ratio.square()
    return torch.where(sampled, loss * inputs["weights"], 0.0)


def metrics(p, inputs, config, sequences):
    q = inputs["sampler_logprobs"]
    return ratio.metrics(p, {**inputs, "logprobs": torch.where(q.isnan(), p, q)}, config, sequences)


def check_config(config):
    ratio.clip_range(config)
    if config["kl_coeff"] < 0:
        raise ValueError(f"kl_coeff must be at least 0, got {config['kl_coeff']}")


LOSS = Loss(
    "stable_reinforce",
    stable_reinforce,
    ratio.REQUIRED,
    ratio.OPTIONAL,
    supplied=("sampler_logprobs",),
    defaults={"kl_coeff": 0.01, "clip_low_threshold": 0.0, "clip_high_threshold": 2.0},
    check_config=check_config,
    metrics=metrics,
    needs_spans=True,
)
