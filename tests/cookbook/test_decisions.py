"""Decisions by one answer token: a custom loss over [N, 2] targets, scored through target_prompt_logprobs."""

from __future__ import annotations

import pytest

from tests.cookbook import data

pytestmark = [pytest.mark.cookbook, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def runs(cookbook):
    forecasting = {"model_name": data.MODEL, "data_path": "markets.csv", "batch_size": 6, "max_steps": 6, "learning_rate": 3e-3}
    forecasting |= {"eval_every": 2, "save_every": 3, "lora_rank": 8, "split_date": "2025-07-01"}
    cookbook.recipes(("decisions.forecasting", "forecasting", forecasting))
    return cookbook


def test_forecasting(runs):
    print(runs.rows("forecasting"))
