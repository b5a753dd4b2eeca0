"""Distillation: on-policy from one teacher and several, off-policy with top-k targets, and from the model's own demonstrations (SDFT)."""

from __future__ import annotations

import pytest

from tests.cookbook import data

pytestmark = [pytest.mark.cookbook, pytest.mark.timeout(900)]

SMALL = {"model_name": data.MODEL, "lora_rank": 4, "group_size": 2, "max_tokens": 12, "max_steps": 2, "learning_rate": 1e-3}
SMALL |= {"eval_every": 0, "save_every": 0, "renderer_name": "qwen3_5_disable_thinking"}


@pytest.fixture(scope="module")
def runs(cookbook):
    on_policy = SMALL | {"dataset": "deepmath", "teacher_model": data.MODEL, "groups_per_batch": 4}
    teachers = SMALL | {"deepmath_teacher_model": data.OTHER, "tulu3_teacher_model": data.BASE}
    sdft = SMALL | {"topk": 20, "groups_per_batch": 4}
    cookbook.recipes(
        ("distillation.on_policy_distillation", "on_policy", on_policy),
        ("distillation.on_policy_multi_teacher", "teachers", teachers | {"deepmath_groups_per_batch": 2, "tulu3_groups_per_batch": 2}),
        ("sdft.train", "sdft", sdft),
        ("sdft.train", "sdft_reverse", sdft | {"reverse": True, "teacher_sync_every": 1}),
        ("sdft.train", "sdft_sampled", sdft | {"topk": 0}),
    )
    return cookbook


@pytest.mark.parametrize("log", ["on_policy", "teachers"])
def test_a_teacher_that_is_the_student_has_nothing_to_say(runs, log):
    rows = runs.rows(log)
    assert abs(rows[0]["teacher_kl"]) <= 1e-5 and rows[0]["grad_norm"] < 1e-2
    assert all(abs(row["optim/kl_sample_train_v1"]) <= 1e-5 for row in rows)
    assert abs(rows[1]["teacher_kl"]) > 1e-4  # Adam takes a whole step on whatever rounding left, and away they are


def test_sdft_with_top_k_targets(runs):
    rows = runs.rows("sdft")
    assert [row["sdft/topk"] for row in rows] == [20, 20]
    assert all(row["sdft/mean_teacher_entropy"] > 0 and row["grad_norm"] > 0 and row["step_skipped"] == 0 for row in rows)


def test_sdft_with_the_reverse_kl_as_a_custom_loss(runs):
    for row in runs.rows("sdft_reverse"):
        assert row["loss:sum"] == pytest.approx(row["sdft/reverse_kl_loss"], rel=1e-5)
        assert row["sdft/reverse_kl_mean"] > 0 and row["grad_norm"] > 0


def test_sdft_without_top_k_sends_cross_entropy_with_inputs_of_another_loss(runs):
    rows = runs.rows("sdft_sampled")
    assert all(row["grad_norm"] > 0 and row["sdft/mean_student_lp"] < 0 for row in rows)


def test_off_policy(cookbook):
    told = cookbook.script("off_policy.py")
    assert told["probability_gap"] <= 1e-5  # the teacher's distribution is the student's, at every position
    assert told["loss"] == pytest.approx(told["expected"], rel=1e-5)
    losses = cookbook.series("off_policy", "train/loss:sum")
    assert len(losses) == 3
    assert [item["name"] for item in cookbook.checkpoints("off_policy")] == ["000002", "final"]
