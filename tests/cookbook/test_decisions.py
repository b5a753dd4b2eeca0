"""Decisions by one answer token: a custom loss over [N, 2] targets in CSR, scored through target_prompt_logprobs; and the chat."""

from __future__ import annotations

import pytest

from tests.cookbook import data

pytestmark = [pytest.mark.cookbook, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def runs(cookbook):
    forecasting = {"model_name": data.MODEL, "data_path": "markets.csv", "batch_size": 6, "epochs": 4, "learning_rate": 3e-3}
    cookbook.recipes(("decisions.forecasting", "forecasting", forecasting | {"eval_every": 4, "save_every": 4, "split_date": "2025-07-01"}))
    return cookbook


def test_forecasting(runs):
    losses, scores = runs.series("forecasting", "train/loss"), runs.series("forecasting", "test/brier_reward")
    assert len(losses) == 8 and len(scores) == 3
    assert sum(losses[-2:]) < sum(losses[:2])  # over the same markets
    assert all(0 <= score <= 1 for score in scores) and scores[-1] > scores[0]
    assert [item["name"] for item in runs.checkpoints("forecasting")] == ["000004", "final"]


def test_the_demo_answers_with_probabilities(cookbook):
    answer = cookbook.process("-m", "tinker_cookbook.recipes.decisions.demo", f"model_name={data.MODEL}", stdin="How do I pay for wool?\n")
    probabilities = [float(line.split(":")[-1].strip(" ,")) for line in answer.splitlines() if line.startswith("  ")]
    assert len(probabilities) == 4 and sum(probabilities) == pytest.approx(1, abs=1e-3)


def test_chat_in_the_terminal(cookbook):
    arguments = [f"base_model={data.MODEL}", "max_tokens=8", "temperature=0.1", "top_p=0.5"]
    said = cookbook.process("-m", "tinker_cookbook.chat_app.tinker_chat_cli", *arguments, stdin="What is sold in Lund for wool?\nexit\n")
    assert "Assistant: <think>" in said  # the renderer's prefill, then what was sampled; it ends at "exit"
