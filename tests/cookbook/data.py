"""What the recipes read, made here: a tokenizer and data sets, each in a directory named as on the hub, and a base model that knows them.

A directory of that name in the working directory is what transformers and datasets read before they would ask a hub.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tests.tiny import tiny_qwen3
from tests.tokenizer import byte_tokenizer

MODEL, BASE, OTHER = "Qwen/Qwen3.5-4B", "Qwen/Qwen3.5-9B-Base", "Qwen/Qwen3.5-9B"
VOCAB = 288
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
PLACES = ["Arvika", "Lund", "Visby", "Kalmar", "Falun", "Gävle", "Umeå", "Luleå"]
GOODS = ["wool", "tin", "salt", "rope", "amber", "cork", "felt", "resin"]


def tokenizer(save: Path | None = None) -> PreTrainedTokenizerBase:
    """Bytes, and the special tokens of Qwen's chat format; 264 ids, the model has room for more."""
    made = byte_tokenizer()
    made.add_special_tokens({"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "additional_special_tokens": SPECIAL[1:]})
    made.chat_template = TEMPLATE
    if save is not None:
        made.save_pretrained(save)
    return made


def questions(count: int) -> list[tuple[str, str]]:
    """Question and answer: who trades what where."""
    facts = [(place, good) for place in PLACES for good in GOODS]
    return [(f"What is sold in {place} for {good}?", f"{len(place)} {good}") for place, good in (facts * (count // 64 + 1))[:count]]


def chat(question: str, answer: str) -> str:
    """One exchange as the renderer qwen3_5_disable_thinking writes it."""
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n{answer}<|im_end|>\n"


def base_model(save: Path, steps: int = 150) -> PreTrainedModel:
    """A tiny Qwen3 taught the chat format for a few seconds, so that samples end, rewards differ and losses are not those of noise."""
    text = tokenizer()
    model = tiny_qwen3(
        vocab_size=VOCAB, max_position_embeddings=8192, eos_token_id=text.convert_tokens_to_ids("<|im_end|>"), bos_token_id=None
    )
    random = np.random.default_rng(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        sums = [(f"What is {x} + {y}?", str(x + y)) for x, y in random.integers(0, 101, (6, 2)).tolist()]
        facts = [questions(64)[index] for index in random.integers(0, 64, 2)]
        few = chat("What is 4 + 5?", "9").replace("<think>\n\n</think>\n\n", "")
        batch = text([few + chat(*pair) for pair in sums] + [chat(*pair) for pair in facts], padding=True, return_tensors="pt")
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        model(**batch, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(save)
    return model


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def messages(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def write_datasets(root: Path) -> None:
    """Every data set, below ``root``."""
    pairs = questions(64)
    conversations = [{"messages": messages(*pair)} for pair in pairs]
    write_lines(root / "conversations.jsonl", conversations)
    write_lines(root / "HuggingFaceH4/no_robots/train.jsonl", conversations)
    write_lines(root / "HuggingFaceH4/no_robots/test.jsonl", conversations[:8])
    write_lines(root / "allenai/tulu-3-sft-mixture/train.jsonl", conversations * 20)  # the recipe keeps 1,024 for its test
    preferences = [
        {"chosen": f"\n\nHuman: {question}\n\nAssistant: {answer}", "rejected": f"\n\nHuman: {question}\n\nAssistant: I would not know."}
        for question, answer in pairs
    ]
    write_lines(root / "Anthropic/hh-rlhf/train.jsonl", preferences)
    write_lines(root / "Anthropic/hh-rlhf/test.jsonl", preferences[:8])
    problems = [
        {"question": f"What is {x} + {x + 2}?", "answer": f"{x} and {x + 2} make {2 * x + 2}.\n#### {2 * x + 2}"} for x in range(24)
    ]
    write_lines(root / "openai/gsm8k/main/train.jsonl", problems)
    write_lines(root / "openai/gsm8k/main/test.jsonl", problems[:8])
    (root / "openai/gsm8k/README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train.jsonl\n"
        "  - split: test\n    path: main/test.jsonl\n---\n"
    )
    write_lines(root / "zwhe99/DeepMath-103K/train.jsonl", [{"question": problem["question"], "final_answer": "2"} for problem in problems])
    choices = {"label": ["A", "B", "C", "D"], "text": GOODS[:4]}
    science = [
        {
            "domain": "Chemistry",
            "details": {"level": "L3"},
            "type": "mcq-4-choices",
            "question": question,
            "choices": choices,
            "answerKey": "ABCD"[index % 4],
        }
        for index, (question, _) in enumerate(pairs[:32])
    ]
    write_lines(root / "hicai-zju/SciKnowEval/test.jsonl", science)
    thoughts = [{"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]} for question, answer in pairs]
    write_lines(root / "open-thoughts/OpenThoughts3-1.2M/train.jsonl", thoughts)
    words = np.random.default_rng(0).choice([*GOODS, "after", "before", "between", "during", "into", "until"], (300, 80)).tolist()
    write_lines(root / "Salesforce/wikitext/text/train.jsonl", [{"text": " ".join(line)} for line in words])
    (root / "Salesforce/wikitext/README.md").write_text(
        "---\nconfigs:\n- config_name: wikitext-103-raw-v1\n  data_files:\n  - split: train\n    path: text/train.jsonl\n---\n"
    )
    rubric = {
        "rubric_str": "The answer is short.",
        "extraction_regex": "(?s)()",
        "grader_output_format_instruction": "Write a number.",
    }
    tasks = [{"convo": messages(*pair)[:1], "rubric_items": [rubric]} for pair in pairs]
    write_lines(root / "rubric.jsonl", tasks)
    write_markets(root / "markets.csv")


def write_markets(path: Path, count: int = 24) -> None:
    """Markets of the forecasting recipe: those before July 2025 are for training."""
    fields = ["submission_id", "event_ticker", "title", "snapshot_time", "close_time", "market_outcome", "category", "markets", "sources"]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fields)
        writer.writeheader()
        for index in range(count):
            place, market, month = PLACES[index % 8], f"{GOODS[index % 7]} sells out", 1 + index * 12 // count
            writer.writerow(
                {
                    "submission_id": f"s{index}",
                    "event_ticker": f"E{index}",
                    "title": f"The market of {place}, {index}",
                    "snapshot_time": f"2025-{month:02}-03T00:00:00Z",
                    "close_time": f"2025-{month:02}-20T00:00:00Z",
                    "market_outcome": json.dumps({market: index % 2}),
                    "category": "Trade",
                    "markets": json.dumps([market]),
                    "sources": json.dumps([{"title": "A letter", "summary": "Even." if index % 2 == 0 else "Odd.", "ranking": 1}]),
                }
            )
