"""Reinforcement learning: what the sampler says is what the trainer computes, with every loss, asynchronous, streaming, over turns."""

from __future__ import annotations

import pytest

from tests.cookbook import data

pytestmark = [pytest.mark.cookbook, pytest.mark.timeout(900)]

LOSSES = ["importance_sampling", "ppo", "cispo", "gspo", "stable_reinforce"]
SMALL = {
    "model_name": data.MODEL,
    "renderer_name": "qwen3_5_disable_thinking",
    "env": "arithmetic",
    "group_size": 4,
    "groups_per_batch": 4,
    "max_tokens": 3,
    "lora_rank": 4,
    "learning_rate": 1e-3,
    "eval_every": 0,
    "save_every": 2,
    "max_steps": 3,
}


FEW = {"model_name": data.MODEL, "renderer_name": "qwen3_5_disable_thinking", "max_steps": 2, "groups_per_batch": 2, "group_size": 2}
FEW |= {"max_tokens": 16, "lora_rank": 4, "learning_rate": 1e-3, "save_every": 0, "eval_every": 0}
JUDGED = {key: value for key, value in FEW.items() if key != "group_size"} | {"train_group_size": 2, "grader_llm_name": data.OTHER}
STREAMING = {"loss_fn": "importance_sampling", "stream_minibatch_config.num_minibatches": 2, "stream_minibatch_config.groups_per_batch": 4}


@pytest.fixture(scope="module")
def runs(cookbook):
    pages = {"task.num_pages_min": 2, "task.num_pages_max": 3, "task.page_chars": 200}
    cookbook.recipes(
        *(("math_rl.train", f"rl/{loss}", SMALL | {"loss_fn": loss}) for loss in LOSSES),
        ("math_rl.train", "rl/substeps", SMALL | {"loss_fn": "ppo", "num_substeps": 2, "compute_post_kl": True}),
        ("math_rl.train", "rl/asynchronous", SMALL | {"loss_fn": "stable_reinforce", "max_steps_off_policy": 2, "max_steps": 4}),
        ("math_rl.train", "rl/streaming", SMALL | STREAMING),
        ("math_rl.train", "rl/gsm8k", SMALL | {"env": "gsm8k", "loss_fn": "cispo", "max_tokens": 12, "eval_every": 1, "max_steps": 2}),
        ("rl_loop", "rl/loop", {"max_steps": 2, "batch_size": 4, "group_size": 2, "max_tokens": 12, "lora_rank": 4, "save_every": 1}),
        ("rl_numerics_check.train", "rl/numerics", FEW | pages),
        ("rubric.train", "rl/rubric", JUDGED | {f"{split}_jsonl_path": "rubric.jsonl" for split in ("train", "test")}),
        ("forecasting.train", "rl/forecasting", FEW | {"data_path": "markets.csv", "split_date": "2025-07-01"}),
    )
    return cookbook


def policy_is_the_samplers(rows):
    steps = [row for row in rows if "optim/kl_sample_train_v1" in row]
    assert steps
    for row in steps:
        assert abs(row["optim/kl_sample_train_v1"]) <= 1e-5 and row["optim/kl_sample_train_v2"] <= 1e-9
        assert row["step_skipped"] == 0
    return steps


@pytest.mark.parametrize("loss", LOSSES)
def test_on_policy(runs, loss):
    steps = policy_is_the_samplers(runs.rows(f"rl/{loss}"))
    assert len(steps) == 3
    for row in steps:  # rewards that differ within a group are what there is to learn from
        assert (row["grad_norm"] > 1e-3) == (row["env/all/by_group/frac_mixed"] > 0)
    assert any(row["grad_norm"] > 1e-3 for row in steps)


def test_substeps(runs):
    rows = runs.series("rl/substeps", "kl_pre_post_v1")
    assert len(rows) == 3 and max(map(abs, rows)) > 1e-5  # the policy moved


def test_asynchronous(runs):
    rows = [row for row in runs.rows("rl/asynchronous") if "async/staleness_max" in row]
    assert [row["training_client/step"] for row in rows] == [0, 1, 2, 3]
    assert all(row["async/staleness_max"] <= 2 and row["step_skipped"] == 0 for row in rows)
    assert rows[0]["async/staleness_max"] == 0 and abs(rows[0]["optim/kl_sample_train_v1"]) <= 1e-5


def test_streaming(runs):
    assert len(policy_is_the_samplers(runs.rows("rl/streaming"))) == 3


def test_gsm8k_with_evaluations(runs):
    assert len(policy_is_the_samplers(runs.rows("rl/gsm8k"))) == 2
    assert runs.series("rl/gsm8k", "test/env/all/correct")


def test_rl_loop_with_a_stop_string(runs):
    assert len(runs.series("rl/loop", "reward/total")) == 2
    assert [item["name"] for item in runs.checkpoints("rl/loop")] == ["000001", "final"]


def test_many_turns_reuse_their_prefix(runs):
    rows = policy_is_the_samplers(runs.rows("rl/numerics"))
    for row in rows:
        assert row["env/all/total_turns"] >= 4
        assert row["tokens/prefill_cached"] + row["tokens/prefill_uncached"] == row["env/all/total_ob_tokens"]
        assert row["tokens/prefill_cached"] > 0


@pytest.mark.parametrize("log", ["rubric", "forecasting"])
def test_rewards_from_a_judge_and_from_the_world(runs, log):
    assert len(policy_is_the_samplers(runs.rows(f"rl/{log}"))) == 2
