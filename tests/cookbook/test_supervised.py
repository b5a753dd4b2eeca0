"""Supervised recipes: sl_loop, chat_sl with rolling checkpoints and resuming."""

from __future__ import annotations

import pytest

from tests.cookbook import data

pytestmark = [pytest.mark.cookbook, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def runs(cookbook):
    sl = {"batch_size": 8, "learning_rate": 1e-2, "lora_rank": 8, "max_steps": 4, "save_every": 2, "max_length": 512}
    chat = sl | {"dataset": "conversations.jsonl", "model_name": data.MODEL, "rolling_save_every": 1, "eval_every": 0, "save_every": 3}
    cookbook.recipes(("sl_loop", "sl_loop", sl), ("chat_sl.train", "chat_sl", chat))
    return cookbook


def test_sl_loop(runs):
    nll = runs.series("sl_loop", "train_mean_nll")
    assert len(nll) == 4 and nll[-1] < 0.7 * nll[0]


def test_chat_sl(runs):
    print(runs.rows("chat_sl"))
