"""What a recipe of tinker-cookbook finds in its working directory when there is no network.

A tokenizer under each model's name, and data sets: ``transformers`` and ``datasets`` take a directory named like a hub id for the thing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

MODELS = ("Qwen/Qwen3.5-4B", "Qwen/Qwen3.5-9B-Base")
SUMS = [(f"What is {a} + {b}?", str(a + b)) for a in range(8) for b in range(8)]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, and the special tokens that the cookbook's Qwen renderers look up. 266 ids; 256 ends a message."""
    vocab = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]})
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def build(root: Path) -> None:
    """Write it all under ``root``."""
    for name in MODELS:
        chat_tokenizer().save_pretrained(root / name)
    chats = [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in SUMS]
    preferred = [{"chosen": f"\n\nHuman: {q}\n\nAssistant: {a}", "rejected": f"\n\nHuman: {q}\n\nAssistant: no idea"} for q, a in SUMS]
    reasoned = [{"question": q, "answer": f"Add them.\n#### {a}"} for q, a in SUMS]
    _lines(root / "chat.jsonl", chats)
    for name, rows in {
        "HuggingFaceH4/no_robots": chats,
        "Anthropic/hh-rlhf": preferred,
        "tangqiaoyu/ToolAlpaca": [{"instruction": q, "output": a} for q, a in SUMS],
        "zwhe99/DeepMath-103K": [{"question": q, "final_answer": a} for q, a in SUMS],
        "open-thoughts/OpenThoughts3-1.2M": [
            {"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]} for q, a in SUMS
        ],
        "openai/gsm8k/main": reasoned,
    }.items():
        _lines(root / name / "train.jsonl", rows)
        _lines(root / name / "test.jsonl", rows[:8])
    files = "  - split: train\n    path: main/train.jsonl\n  - split: test\n    path: main/test.jsonl\n"
    (root / "openai/gsm8k/README.md").write_text(f"---\nconfigs:\n- config_name: main\n  data_files:\n{files}---\n")


def _lines(path: Path, rows: Iterable[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
