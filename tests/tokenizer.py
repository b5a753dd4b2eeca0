"""A byte-level tokenizer of 259 tokens, so that tests with text need no download."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def byte_tokenizer(save: str | Path | None = None, chat: bool = False) -> PreTrainedTokenizerFast:
    """Ids 0 to 255 are bytes (in the order of their printable stand-ins), 256 is the end token. save: also write it there."""
    vocab = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>")
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    if save is not None:
        tokenizer.save_pretrained(save)
    return tokenizer
