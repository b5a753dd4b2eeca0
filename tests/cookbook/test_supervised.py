"""Supervised recipes: sl_loop with resuming, chat_sl with rolling checkpoints, prompt distillation and off-policy reasoning."""

from __future__ import annotations

import json

import pytest
import tinker

from tests.cookbook import data

pytestmark = [pytest.mark.cookbook, pytest.mark.timeout(900)]

SMALL = {"batch_size": 8, "learning_rate": 3e-3, "max_length": 512, "max_steps": 4}
LOOP = SMALL | {"lora_rank": 8, "save_every": 2}
CHAT = SMALL | {"model_name": data.MODEL, "lora_rank": 8, "save_every": 2, "rolling_save_every": 1, "eval_every": 2}


@pytest.fixture(scope="module")
def runs(cookbook):
    cookbook.recipes(
        ("sl_loop", "sl_loop", LOOP),
        ("chat_sl.train", "chat_sl", CHAT | {"dataset": "no_robots"}),
        ("prompt_distillation.train", "prompt_distillation", SMALL | {"model_name": data.MODEL, "file_path": "conversations.jsonl"}),
        ("distillation.off_policy_reasoning", "reasoning", SMALL | {"max_prompts": 48, "buffer_size": 8, "eval_every": 0}),
    )
    return cookbook


@pytest.mark.parametrize("log", ["sl_loop", "chat_sl", "prompt_distillation", "reasoning"])
def test_likelihood_grows(runs, log):
    likelihoods = runs.series(log, "train_mean_nll")[:4]
    assert len(likelihoods) == 4 and likelihoods[-1] < 0.9 * likelihoods[0]


def test_evaluations(runs):
    tested = runs.series("chat_sl", "test/nll")
    assert len(tested) >= 2 and tested[-1] < tested[0]


def test_rolling_checkpoints_are_deleted_and_the_others_stay(runs):
    noted = runs.checkpoints("chat_sl")
    assert [(item["name"], bool(item.get("rolling"))) for item in noted] == [
        ("000001", True),
        ("000002", False),
        ("000003", True),
        ("final", False),
    ]
    client = tinker.ServiceClient(base_url=runs.url, api_key="tml-cookbook-test")
    run = noted[0]["state_path"].removeprefix("tinker://").split("/")[0]
    there = {item.checkpoint_id for item in client.create_rest_client().list_checkpoints(run).result().checkpoints}
    assert there == {f"{kind}/{name}" for kind in ("weights", "sampler_weights") for name in ("000002", "final")}
    client.close("success").result()


def test_resumed_training_goes_on_as_if_never_interrupted(runs):
    noted = runs.root / "sl_loop" / "checkpoints.jsonl"
    before, lines = runs.rows("sl_loop"), noted.read_text().splitlines()
    noted.write_text(next(line for line in lines if '"000002"' in line) + "\n")  # as an interruption after it leaves things
    runs.recipes(("sl_loop", "sl_loop", LOOP))
    again = runs.rows("sl_loop")[len(before) :]
    assert [row["step"] for row in again] == [2, 3]
    for row, resumed in zip(before[2:], again, strict=True):  # the second only when the optimizer's state was there
        assert resumed["train_mean_nll"] == pytest.approx(row["train_mean_nll"], rel=1e-5)
        assert resumed["grad_norm"] == pytest.approx(row["grad_norm"], rel=1e-4)
    first, last = (json.loads(line)["state_path"].split("/")[2] for line in (lines[0], noted.read_text().splitlines()[-1]))
    assert first != last  # another run
