"""Off-policy distillation has no recipe of its own: its library run as a recipe would. The teacher is the student's own base model, so a
fresh student agrees with it: prints by how much it does not, and the loss with what it should be."""

from __future__ import annotations

import asyncio
import json

import tinker
from tinker_cookbook.distillation import train_off_policy
from tinker_cookbook.distillation.datasets import TeacherConfig
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

MODEL = "Qwen/Qwen3.5-4B"

common = ChatDatasetBuilderCommonConfig(
    model_name_for_tokenizer=MODEL, renderer_name="qwen3_5_disable_thinking", max_length=512, batch_size=8
)
builder = FromConversationFileBuilder(common_config=common, file_path="conversations.jsonl")
config = train_off_policy.Config(
    learning_rate=1e-4,
    dataset_configs=[train_off_policy.DatasetWithTeacher(dataset_builder=builder, teacher_config=TeacherConfig(base_model=MODEL))],
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


async def check() -> dict[str, float]:
    service = tinker.ServiceClient()
    teacher = await service.create_sampling_client(base_model=MODEL)
    student = await service.create_lora_training_client(MODEL, rank=4)
    train, _ = builder()
    datums = await train_off_policy._collect_topk_batch([teacher] * 8, train.get_batch(0), 20)
    output = await student.forward(datums, "cross_entropy")
    gap, expected = 0.0, 0.0
    for datum, answer in zip(datums, output.loss_fn_outputs, strict=True):
        weights, logprobs = datum.loss_fn_inputs["weights"].to_torch().double(), answer["logprobs"].to_torch().double()
        asked = weights.sum(-1) > 0
        gap = max(gap, (logprobs[asked].softmax(-1) - weights[asked]).abs().max().item())
        expected -= (weights * logprobs).sum().item()
    return {"probability_gap": gap, "expected": expected, "loss": output.metrics["loss:sum"]}


asyncio.run(train_off_policy.main(config))
print(json.dumps(asyncio.run(check())))
