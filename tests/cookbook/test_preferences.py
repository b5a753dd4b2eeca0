"""Preferences: DPO, whose loss is ln 2 before the first step, and the pairwise game for shorter answers."""

from __future__ import annotations

import math

import pytest

from tests.cookbook import data

pytestmark = [pytest.mark.cookbook, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def runs(cookbook):
    dpo = {"dataset": "hhh", "model_name": data.MODEL, "batch_size": 8, "learning_rate": 1e-3, "max_steps": 4, "max_length": 512}
    shorter = {"batch_size": 2, "group_size": 4, "max_tokens": 8, "learning_rate": 1e-3, "max_steps": 2, "eval_every": 0}
    cookbook.recipes(("preference.dpo.train", "dpo", dpo), ("preference.shorter.train", "shorter", shorter))
    return cookbook


def test_dpo_begins_at_ln_2(runs):
    rows = runs.rows("dpo")
    print(rows)
    assert rows[0]["dpo_loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert rows[0]["margin"] == pytest.approx(0, abs=1e-5)
    assert rows[-1]["dpo_loss"] < rows[0]["dpo_loss"] and rows[-1]["margin"] > 0


def test_shorter(runs):
    print(runs.rows("shorter"))
