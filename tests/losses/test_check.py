"""Every error text that a bad request meets before it is queued, and the configs that pass."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pytest

from spindle import losses
from spindle.errors import InvalidRequest


@dataclass
class Scanned:
    """What losses.check reads of a ScannedRequest."""

    loss_fn: str
    target_widths: np.ndarray
    widths: dict[str, list[int]]
    loss_fn_config: dict = field(default_factory=dict)
    integers: tuple[str, ...] = ()
    spans: bool = False
    model_id: str = "m"
    seq_id: int = 7

    @property
    def input_names(self):
        return list(self.widths)

    @property
    def has_spans(self):
        return np.full(len(self.target_widths), self.spans)

    def input_widths(self, name):
        return np.array(self.widths[name])

    def input_faults(self, name):
        widths = self.target_widths if name == "target_tokens" else self.input_widths(name)
        faults = (widths == -1, (widths != -1) & (widths != self.target_widths), np.full(len(widths), name in self.integers))
        return tuple(int(mask.argmax()) if mask.any() else -1 for mask in faults)


RATIO = {"logprobs": [0, 0], "advantages": [0, 0]}


def scanned(loss_fn="ppo", targets=(0, 0), widths=RATIO, **more):
    return Scanned(loss_fn, np.array(targets), dict(widths), **more)


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (scanned("nothing"), "loss_fn 'nothing' is not known; known are cispo, cross_entropy, custom, dro, gspo"),
        (scanned(targets=(0, -1)), "datum 1: target_tokens is missing; every loss needs it"),
        (
            scanned(widths={"logprobs": [0, 0], "advantages": [0, -1]}),
            "datum 1: advantages is missing; ppo needs target_tokens, logprobs, adv",
        ),
        (scanned(widths={"logprobs": [0, 0]}), "datum 0: advantages is missing"),
        (scanned(widths={**RATIO, "reward": [-1, 0]}), "datum 1: loss_fn_inputs has 'reward', which no loss knows; ppo takes advantages, "),
        (
            scanned(widths={**RATIO, "advantages": [0, 3]}),
            "datum 1: advantages has shape [N, 3] but target_tokens has [N]; they must be the",
        ),
        (scanned("cross_entropy", (5, 5), {"weights": [5, 0]}), "datum 1: weights has shape [N] but target_tokens has [N, 5]"),
        (scanned(integers=("advantages",)), "datum 0: advantages has an integer dtype; it must be float32 or bfloat16"),
        (scanned(loss_fn_config={"beta": 0.1}), "loss_fn_config: beta is not a config key of ppo; it takes clip_low_threshold, clip_high"),
        (
            scanned("cross_entropy", widths={}, loss_fn_config={"x": 1.0}),
            "loss_fn_config: x is not a config key of cross_entropy; it takes none",
        ),
        (scanned(loss_fn_config={"clip_low_threshold": math.nan}), "loss_fn_config: clip_low_threshold must be finite, got nan"),
        (scanned(loss_fn_config={"clip_low_threshold": "a"}), "loss_fn_config: clip_low_threshold must be a number, got 'a'"),
        (scanned(loss_fn_config={"clip_low_threshold": -0.1}), "loss_fn_config: clip_low_threshold must be at least 0, got -0.1"),
        (scanned(loss_fn_config={"clip_low_threshold": 2.0}), "loss_fn_config: clip_low_threshold 2.0 is above clip_high_threshold 1.2"),
        (scanned("dro", loss_fn_config={"beta": -1.0}), "loss_fn_config: beta must be at least 0, got -1.0"),
        (
            scanned("stable_reinforce", spans=True, loss_fn_config={"kl_coeff": -1.0}),
            "loss_fn_config: kl_coeff must be at least 0, got -1.0",
        ),
        (scanned("stable_reinforce"), "datum 0: no sampled_tokens span; stable_reinforce reads the sampler's own logprobs"),
        (
            scanned("stable_reinforce", spans=True, widths={**RATIO, "sampler_logprobs": [0, 0]}),
            "datum 0: loss_fn_inputs has 'sampler_logprobs', which no loss knows",
        ),
        (scanned("custom", loss_fn_config={"loss_id": "x"}), "loss_fn_config: loss_id 'x' is not known; create it with create_custom_loss"),
    ],
)
def test_refused(request_, text):
    with pytest.raises(InvalidRequest) as caught:
        losses.check(request_)
    assert str(caught.value).startswith(text)
    assert (caught.value.model_id, caught.value.seq_id) == ("m", 7)


@pytest.mark.parametrize(
    ("request_", "config"),
    [
        (scanned(), {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
        (scanned(loss_fn_config={"clip_high_threshold": 0.8}), {"clip_low_threshold": 0.8, "clip_high_threshold": 0.8}),
        (scanned("cross_entropy", widths={}), {}),
        (scanned("cross_entropy", widths=RATIO), {}),  # another loss's inputs are accepted and not used
        (scanned("cross_entropy", (0, 4), {"weights": [-1, 4]}), {}),
        (scanned("stable_reinforce", spans=True), {"kl_coeff": 0.01, "clip_low_threshold": 0.0, "clip_high_threshold": 2.0}),
    ],
)
def test_accepted(request_, config):
    assert losses.check(request_) == config


@pytest.mark.parametrize(("loss", "key"), [(name, key) for name in losses.names() if name != "custom" for key in losses.get(name).defaults])
def test_each_config_key_at_its_edges(loss, key):
    """0 is the least of every key; low may equal high; text, NaN, infinity and what lies below 0 are refused by the key's name."""
    given = lambda value, **more: scanned(loss, spans=True, loss_fn_config={key: value, **more})  # noqa: E731
    other = {"clip_low_threshold": "clip_high_threshold", "clip_high_threshold": "clip_low_threshold"}.get(key)
    for value in (0.0, 1.0, 1e300):
        both = {other: value} if other else {}
        assert losses.check(given(value, **both))[key] == value
    for value in (-1e-300, math.nan, math.inf, -math.inf, "1"):
        with pytest.raises(InvalidRequest, match=f"loss_fn_config: {key}|loss_fn_config: clip_low_threshold"):
            losses.check(given(value))
    if other:
        low, high = (2.0, 2.0 - 1e-9)
        with pytest.raises(InvalidRequest, match="is above clip_high_threshold"):
            losses.check(scanned(loss, spans=True, loss_fn_config={"clip_low_threshold": low, "clip_high_threshold": high}))
