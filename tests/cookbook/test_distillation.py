"""Distillation: on-policy, off-policy with top-k targets, and from the model's own demonstrations (SDFT)."""

from __future__ import annotations

import pytest

from tests.cookbook import data

pytestmark = [pytest.mark.cookbook, pytest.mark.timeout(900)]

SMALL = {"model_name": data.MODEL, "lora_rank": 4, "groups_per_batch": 4, "group_size": 2, "max_tokens": 12, "max_steps": 2}
SMALL |= {"learning_rate": 1e-3, "eval_every": 0, "save_every": 0}


@pytest.fixture(scope="module")
def runs(cookbook):
    on_policy = SMALL | {"dataset": "deepmath", "teacher_model": data.MODEL, "renderer_name": "qwen3_5_disable_thinking"}
    sdft = SMALL | {"topk": 20, "renderer_name": "qwen3_5_disable_thinking"}
    cookbook.recipes(
        ("distillation.on_policy_distillation", "on_policy", on_policy),
        ("sdft.train", "sdft", sdft),
        ("sdft.train", "sdft_reverse", sdft | {"reverse": True}),
        ("sdft.train", "sdft_sampled", sdft | {"topk": 0}),
    )
    return cookbook


def test_on_policy(runs):
    print(runs.rows("on_policy"))


@pytest.mark.parametrize("log", ["sdft", "sdft_reverse", "sdft_sampled"])
def test_sdft(runs, log):
    print(runs.rows(log))


def test_off_policy(cookbook):
    cookbook.process(str(__file__).replace("test_distillation", "off_policy"))
    print(cookbook.rows("off_policy"))
