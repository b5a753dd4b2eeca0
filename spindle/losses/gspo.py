"""gspo (arXiv 2507.18071, token form): log s = mean over M of (sg(p) - q) per datum, M being where sequence_ratio_mask is not 0;
the token's ratio is exp(log s + p - sg(p)); sum over all tokens of -min(ratio A, clip(ratio, low, high) A) w."""

from __future__ import annotations

from spindle.errors import InvalidRequest
from spindle.losses import ratio
from spindle.losses.base import Loss


def _log_sequence_ratio(p, inputs, sequences):
    used = inputs["sequence_ratio_mask"] != 0
    count = sequences.mean(used.float(), used)
    if not bool((count > 0).all()):
        datum = int((count == 0).nonzero()[0, 0])
        raise InvalidRequest(f"datum {datum} of its part: sequence_ratio_mask is 0 everywhere; gspo needs a token to take the ratio over")
    return sequences.mean(p.detach() - inputs["logprobs"], used)[sequences.datum_of_cell(p.device)]


def gspo(p, inputs, config, sequences):
    log_ratio = _log_sequence_ratio(p, inputs, sequences) + p - p.detach()
    return ratio.pessimistic(log_ratio, inputs, config)


def metrics(p, inputs, config, sequences):
    return ratio.of_ratio(_log_sequence_ratio(p, inputs, sequences), p - inputs["logprobs"], inputs, config, sequences)


LOSS = Loss(
    "gspo",
    gspo,
    ratio.REQUIRED,
    {**ratio.OPTIONAL, "sequence_ratio_mask": 1.0},
    defaults={"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4},
    check_config=ratio.clip_range,
    whole_segment=True,
    metrics=metrics,
)
