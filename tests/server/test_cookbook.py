"""Recipes of tinker-cookbook 0.6.1, unmodified, against the server: each runs to its end, and its cheap invariants hold.

Skipped where the cookbook is not installed. To install it: ``pip install --no-deps tinker-cookbook==0.6.1``, then
``pip install chz blobfile cloudpickle datasets termcolor tiktoken aiohttp pillow sympy pylatexenc math-verify``
(its ``tml-renderers`` is imported only for models that are not served here).

Not here, because they need a network or another service: decisions and forecasting (their questions are downloaded), audio and vision
(other kinds of input), code, search, verifiers and harbor (sandboxes and tools), rubric (a grader model).
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys

import pytest

from spindle.compute.model import BaseModel
from spindle.engine import Engine
from spindle.server import running
from tests.server import cookbook_world
from tests.tiny import tiny_qwen3

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(importlib.util.find_spec("tinker_cookbook") is None, reason="tinker-cookbook is not installed"),
]

MODEL, BASE = cookbook_world.MODELS
ARITHMETIC = "recipes.math_rl.train env=arithmetic group_size=4 groups_per_batch=4 max_tokens=5 learning_rate=1e-4 max_steps=2 eval_every=0"
RECIPES = {
    **{f"math_rl {loss}": f"{ARITHMETIC} loss_fn={loss}" for loss in ("stable_reinforce", "importance_sampling", "ppo", "cispo", "gspo")},
    "math_rl asynchronous": f"{ARITHMETIC} max_steps_off_policy=1",
    "math_rl streaming": f"{ARITHMETIC} stream_minibatch_config.groups_per_batch=4 stream_minibatch_config.num_minibatches=2",
    "chat_sl": "recipes.chat_sl.train dataset=chat.jsonl batch_size=16 max_length=512 max_steps=3 rolling_save_every=1 eval_every=0",
    "sl_loop": "recipes.sl_loop batch_size=16 max_length=512 max_steps=3",
    "rl_loop": "recipes.rl_loop batch_size=4 group_size=4 max_tokens=5 max_steps=2",
    "dpo": "recipes.preference.dpo.train batch_size=8 max_length=512 max_steps=2",
    "shorter": "recipes.preference.shorter.train batch_size=2 group_size=4 max_tokens=8 max_steps=2 eval_every=0",
    "sdft": "recipes.sdft.train dataset=toolalpaca groups_per_batch=4 max_tokens=8 topk=20 max_steps=2 eval_every=0",
    "on_policy_distillation": f"recipes.distillation.on_policy_distillation teacher_model={MODEL} groups_per_batch=4 "
    "group_size=2 max_tokens=8 max_steps=2 eval_every=0",
    "off_policy_distillation": "recipes.distillation.off_policy_reasoning batch_size=8 max_length=512 buffer_size=64 "
    "max_prompts=64 max_steps=2 eval_every=0",
}
LOOPS = ("sl_loop", "rl_loop")  # the two that neither ask about their log directory nor take its behaviour


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    root = tmp_path_factory.mktemp("cookbook")
    cookbook_world.build(root)
    return root


@pytest.fixture(scope="module")
def cookbook_url(world):
    model = BaseModel.load(tiny_qwen3(max_position_embeddings=4096, eos_token_id=256))
    model.tokenizer = cookbook_world.chat_tokenizer()
    with Engine(model) as engine, running(engine, store=world / "store", name=MODEL, aliases=[BASE]) as url:
        yield url


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_runs_to_its_end(world, cookbook_url, recipe):
    module, *options = RECIPES[recipe].split()
    log = world / "logs" / recipe.replace(" ", "-")
    if recipe not in LOOPS:
        options.append("behavior_if_log_dir_exists=delete")
    command = [sys.executable, "-m", f"tinker_cookbook.{module}", f"model_name={MODEL}", f"log_path={log}", *options]
    environment = os.environ | {"TINKER_BASE_URL": cookbook_url, "TINKER_API_KEY": "tml-cookbook", "WANDB_MODE": "disabled"}
    done = subprocess.run(command, cwd=world, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    steps = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    assert steps
    for step in steps:
        if (divergence := step.get("optim/kl_sample_train_v1")) is not None and "asynchronous" not in recipe:
            assert abs(divergence) <= 1e-5  # the sampler and the trainer are one model
        assert all(math.isfinite(value) for value in step.values() if isinstance(value, float))
    if recipe == "dpo":
        assert steps[0]["dpo_loss"] == pytest.approx(math.log(2), abs=1e-6)
    if recipe == "on_policy_distillation":
        assert abs(steps[0]["teacher_kl"]) <= 1e-5
