"""Tutorial 202: every loss against its formula, and against each other where they must agree."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = [pytest.mark.cookbook, pytest.mark.timeout(900)]

RATIO = ["importance_sampling", "ppo", "cispo", "gspo", "stable_reinforce"]


@pytest.fixture(scope="module")
def answers(cookbook):
    return cookbook.script("losses.py")


def loss(name: str, p: np.ndarray, q: np.ndarray, advantages: np.ndarray) -> float:
    ratio = np.exp(p - q)
    if name == "importance_sampling":
        return float(-(ratio * advantages).sum())
    if name == "ppo":
        return float(-np.minimum(ratio * advantages, np.clip(ratio, 0.9, 1.1) * advantages).sum())
    if name == "cispo":
        return float(-(np.clip(ratio, 0.0, 4.0) * advantages * p).sum())
    ratio = np.full_like(p, np.exp((p - q)[advantages != 0].mean()))
    return float(-np.minimum(ratio * advantages, np.clip(ratio, 0.9, 1.1) * advantages).sum())


@pytest.mark.parametrize("name", RATIO[:4])
def test_off_policy_losses_are_their_formulas(answers, name):
    told = answers[f"{name}_off_policy"]
    expected = 0.0
    for p, inputs in zip(told["logprobs"], told["inputs"], strict=True):
        expected += loss(name, *(np.array(values, np.float64) for values in (p, inputs["logprobs"], inputs["advantages"])))
    assert told["loss"] == pytest.approx(expected, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("name", RATIO)
def test_on_policy_gradients_are_those_of_weighted_cross_entropy(answers, name):
    assert answers["weighted"]["grad_norm"] > 1
    assert answers[name]["grad_norm"] == pytest.approx(answers["weighted"]["grad_norm"], rel=1e-4)


def test_cross_entropy(answers):
    told = answers["cross_entropy"]
    assert told["loss"] == pytest.approx(-np.dot(told["logprobs"][0], told["weights"]), rel=1e-5)


def test_custom_losses_agree_wherever_they_run(answers):
    here, there, plain = answers["squared_here"], answers["squared_there"], answers["likelihood_here"]
    told = answers["cross_entropy"]
    assert here["loss"] == pytest.approx(np.dot(np.square(told["logprobs"][0]), told["weights"]), rel=1e-5)
    assert there["loss"] == pytest.approx(here["loss"], rel=1e-5)
    assert there["metrics"]["custom/squared:sum"] == pytest.approx(here["loss"], rel=1e-5)
    assert there["grad_norm"] == pytest.approx(here["grad_norm"], rel=1e-4)
    assert plain["loss"] == pytest.approx(told["loss"], rel=1e-5) and plain["grad_norm"] == pytest.approx(told["grad_norm"], rel=1e-4)
