"""Tiny random decoder models that every test shares. Each builder returns a transformers model; ``save=`` also writes its directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCAB = 2048


def build(config: PretrainedConfig, save: str | Path | None = None, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A randomly initialised model, larger weights than transformers' default so that attention and logits are far from uniform."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1:
                p.normal_(0.0, 1.5 / p.shape[-1] ** 0.5)
            elif "norm" in name:
                p.add_(0.1 * torch.randn_like(p))
            else:
                p.normal_(0.0, 0.1)
    model = model.to(dtype)
    if save is not None:
        model.save_pretrained(save)
    return model


def _shape(**overrides: Any) -> dict[str, Any]:
    shape = dict(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=None,
    )
    return shape | overrides


def tiny_llama(save: str | Path | None = None, *, tied: bool = False, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Llama, 2 layers of width 64, vocabulary 2,048. overrides: fields of LlamaConfig."""
    return build(LlamaConfig(**_shape(tie_word_embeddings=tied, **overrides)), save, seed)


def tiny_qwen3(save: str | Path | None = None, *, tied: bool = False, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Qwen3 (query and key norms), otherwise as ``tiny_llama``."""
    return build(Qwen3Config(**_shape(tie_word_embeddings=tied, **overrides)), save, seed)


def tiny_mistral(save: str | Path | None = None, **overrides: Any) -> PreTrainedModel:
    """Mistral with a sliding window of 24."""
    return build(MistralConfig(**_shape(**{"sliding_window": 24, "tie_word_embeddings": False} | overrides)), save)


def tiny_phi3(save: str | Path | None = None, **overrides: Any) -> PreTrainedModel:
    """Phi-3: fused qkv_proj and gate_up_proj."""
    shape = _shape(tie_word_embeddings=False, **overrides)
    del shape["head_dim"]
    return build(Phi3Config(**shape), save)


def tiny_gemma3(save: str | Path | None = None, **overrides: Any) -> PreTrainedModel:
    """Gemma 3: one sliding layer (window 24) and one full, tied head, scaled embeddings, a norm after each part."""
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24, "query_pre_attn_scalar": 16}
    return build(Gemma3TextConfig(**_shape(**layers | overrides)), save)


def tiny_qwen3_moe(save: str | Path | None = None, **overrides: Any) -> PreTrainedModel:
    """Qwen3-MoE: 4 experts of width 48, 2 per token."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
    return build(Qwen3MoeConfig(**_shape(tie_word_embeddings=False, **experts | overrides)), save)
