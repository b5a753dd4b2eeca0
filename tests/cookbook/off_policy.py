"""Off-policy distillation has no recipe of its own: its library run as a recipe would. The teacher is the student's own base model."""

from __future__ import annotations

import asyncio

from tinker_cookbook.distillation import train_off_policy
from tinker_cookbook.distillation.datasets import TeacherConfig
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

MODEL = "Qwen/Qwen3.5-4B"

common = ChatDatasetBuilderCommonConfig(
    model_name_for_tokenizer=MODEL, renderer_name="qwen3_5_disable_thinking", max_length=512, batch_size=8
)
dataset = train_off_policy.DatasetWithTeacher(
    dataset_builder=FromConversationFileBuilder(common_config=common, file_path="conversations.jsonl"),
    teacher_config=TeacherConfig(base_model=MODEL),
)
config = train_off_policy.Config(
    learning_rate=1e-4,
    dataset_configs=[dataset],
    model_name=MODEL,
    recipe_name="recipe_distillation_off_policy",
    lora_rank=4,
    n_teacher_targets=20,
    batch_size=8,
    save_every=2,
    eval_every=0,
    max_steps=3,
    log_path="off_policy",
)
asyncio.run(train_off_policy.main(config))
