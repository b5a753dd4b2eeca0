import math

import pytest

from spindle import AdamParams, DimuonParams
from spindle.errors import UserError


@pytest.mark.parametrize(
    ("kind", "field", "value", "text"),
    [
        (AdamParams, "learning_rate", math.nan, "learning_rate: got nan; allowed is a finite number, 0 or more"),
        (AdamParams, "learning_rate", math.inf, "learning_rate: got inf; allowed is a finite number, 0 or more"),
        (AdamParams, "learning_rate", -1e-4, "learning_rate: got -0.0001; allowed is a finite number, 0 or more"),
        (AdamParams, "beta1", 1.0, "beta1: got 1.0; allowed is a number from 0 up, below 1"),
        (AdamParams, "beta2", -0.5, "beta2: got -0.5; allowed is a number from 0 up, below 1"),
        (AdamParams, "learning_rate", 1e39, "learning_rate: got 1e+39; allowed is a finite number, 0 or more"),
        (AdamParams, "eps", 0.0, "eps: got 0.0; allowed is 1e-37 or more: below, float32 makes 0/0 of a gradient that is zero"),
        (AdamParams, "eps", "small", "eps: got 'small'; allowed is a finite number, 0 or more"),
        (AdamParams, "weight_decay", True, "weight_decay: got True; allowed is a finite number, 0 or more"),
        (AdamParams, "grad_clip_norm", None, "grad_clip_norm: got None; allowed is a finite number, 0 or more"),
        (DimuonParams, "beta1", 2.0, "beta1: got 2.0; allowed is a number from 0 up, below 1"),
        (
            DimuonParams,
            "rank_lr_correction_exponent",
            1e6,
            "rank_lr_correction_exponent: got 1000000.0; allowed is a number from 0 up, below 8",
        ),
        (DimuonParams, "damping", math.inf, "damping: got inf; allowed is a finite number, 0 or more"),
    ],
)
def test_optimizer_settings_check_themselves(kind, field, value, text):
    with pytest.raises(UserError) as caught:
        kind(**{field: value})
    assert str(caught.value) == text


def test_defaults_and_edges_are_allowed():
    AdamParams(learning_rate=0, beta1=0, eps=1e-37)
    DimuonParams()
