"""What the importance-ratio losses share: p is the model's logprob, q (``logprobs``) the sampler's, r = exp(p - q)."""

from __future__ import annotations

import torch

from spindle.losses.base import Config, Inputs, Sequences

REQUIRED = ("logprobs", "advantages")
OPTIONAL = {"weights": 1.0}  # multiplies the token's loss


def clip_range(config: Config) -> None:
    """Config check of the losses with two clip thresholds."""
    low, high = config["clip_low_threshold"], config["clip_high_threshold"]
    if low < 0:
        raise ValueError(f"clip_low_threshold must be at least 0, got {low}")
    if low > high:
        raise ValueError(f"clip_low_threshold {low} is above clip_high_threshold {high}")


def clipped(ratio: torch.Tensor, config: Config) -> torch.Tensor:
    return ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"])


def acting(inputs: Inputs) -> torch.Tensor:
    """[cells] bool: where the advantage and the weight are not 0."""
    return (inputs["advantages"] != 0) & (inputs["weights"] != 0)


def exp_where(used: torch.Tensor, log_ratio: torch.Tensor) -> torch.Tensor:
    """exp(log_ratio) where it is used, else 1: a ratio past float32's range that counts for nothing must not become 0 * inf = NaN, in the
    loss or in its gradient."""
    return torch.where(used, log_ratio, 0.0).exp()


def pessimistic(log_ratio: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    """-min(r A, clip(r) A) w, per cell."""
    advantages, ratio = inputs["advantages"], log_ratio.detach().exp()
    bound = clipped(ratio, config)
    free = acting(inputs) & (ratio * advantages <= bound * advantages)  # where the first is the smaller
    return -torch.where(free, exp_where(free, log_ratio), bound) * advantages * inputs["weights"]


def metrics(p: torch.Tensor, inputs: Inputs, config: Config, sequences: Sequences) -> dict[str, float]:
    """Over the cells that act on the gradient (advantage and weight not 0), first a mean per datum, then over datums, so that a client
    that weighs its chunks by their datums gets the mean of the whole: the ratio, the share of ratios outside the clip range (where
    there is one), and an estimate of KL(sampler || model), the mean of r - 1 - log r (Schulman's k3)."""
    log_ratio = p - inputs["logprobs"]
    return of_ratio(log_ratio, log_ratio, inputs, config, sequences)


def of_ratio(used: torch.Tensor, log_ratio: torch.Tensor, inputs: Inputs, config: Config, sequences: Sequences) -> dict[str, float]:
    """As ``metrics``; ``used`` [cells] is the log of the ratio that the loss clips."""
    on = acting(inputs)
    ratio = used.exp()
    out = {
        "ratio:mean": (ratio, 1.0),
        "kl:mean": (log_ratio.exp() - 1 - log_ratio, 0.0),
    }
    if "clip_low_threshold" in config:
        outside = (ratio < config["clip_low_threshold"]) | (ratio > config["clip_high_threshold"])
        out["clip_fraction:mean"] = (outside.float(), 0.0)
    return {name: float(sequences.mean(x.double(), on, empty).mean()) for name, (x, empty) in out.items()}
