"""math_rl on arithmetic: every loss; asynchronous and streaming; what the sampler says is what the trainer computes."""

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
    "max_tokens": 4,
    "lora_rank": 4,
    "learning_rate": 1e-3,
    "eval_every": 0,
    "save_every": 2,
    "max_steps": 3,
}


STREAMING = {"loss_fn": "importance_sampling", "stream_minibatch_config.num_minibatches": 2, "stream_minibatch_config.groups_per_batch": 4}


@pytest.fixture(scope="module")
def runs(cookbook):
    substeps = {"num_substeps": 2, "compute_post_kl": True}
    cookbook.recipes(
        *(("math_rl.train", f"rl/{loss}", SMALL | {"loss_fn": loss} | (substeps if loss == "ppo" else {})) for loss in LOSSES),
        ("math_rl.train", "rl/asynchronous", SMALL | {"loss_fn": "stable_reinforce", "max_steps_off_policy": 2, "max_steps": 4}),
        ("math_rl.train", "rl/streaming", SMALL | STREAMING),
    )
    return cookbook


@pytest.mark.parametrize("loss", LOSSES)
def test_on_policy_the_trainer_gives_the_samplers_logprobs(runs, loss):
    rows = runs.rows(f"rl/{loss}")
    print(rows)


def test_asynchronous(runs):
    print(runs.rows("rl/asynchronous"))


def test_streaming(runs):
    print(runs.rows("rl/streaming"))
