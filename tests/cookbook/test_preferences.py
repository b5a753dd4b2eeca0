"""Preferences: DPO, whose loss is ln 2 before the first step; the pairwise game for shorter answers; the three stages of RLHF."""

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
    assert rows[0]["dpo_loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert rows[0]["margin"] == pytest.approx(0, abs=1e-5)
    assert len(rows) == 4 and rows[-1]["dpo_loss"] < 0.5 and rows[-1]["margin"] > 0.1 and rows[-1]["accuracy"] == 1


def test_shorter(runs):
    rows = [row for row in runs.rows("shorter") if "optim/kl_sample_train_v1" in row]
    assert len(rows) == 2
    for row in rows:
        assert abs(row["optim/kl_sample_train_v1"]) <= 1e-5
        assert row["env/all/win_minus_loss"] == pytest.approx(0, abs=1e-9)  # what one of a pair wins the other loses
    assert rows[0]["grad_norm"] > 0


def test_rlhf(cookbook):
    arguments = ["max_steps=2", "batch_size=4", "max_length=512", "rl_max_tokens=8", "rl_group_size=2", "lora_rank=4", "eval_every=0"]
    cookbook.process("-m", "tinker_cookbook.recipes.preference.rlhf.rlhf_pipeline", *arguments)
    logs = {path.parent.name: path.parent for path in (cookbook.root / "runs").rglob("metrics.jsonl")}
    assert len(logs) == 3
    stages = {name.split("-")[-1].split("_")[-1]: cookbook.rows(str(path.relative_to(cookbook.root))) for name, path in logs.items()}
    assert {"sft", "rm", "rl"} == set(stages), logs
    for stage in ("sft", "rm"):
        assert stages[stage][-1]["train_mean_nll"] < stages[stage][0]["train_mean_nll"]
    assert all(abs(row["optim/kl_sample_train_v1"]) <= 1e-5 for row in stages["rl"] if "optim/kl_sample_train_v1" in row)
