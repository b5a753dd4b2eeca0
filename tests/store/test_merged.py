"""Merged exports, loaded by transformers alone, against the adapter applied to the base model."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from spindle import Engine
from spindle.compute.adapter import Adapter
from spindle.compute.attention import Packing
from spindle.compute.lora import RowGroup
from spindle.compute.model import BaseModel
from spindle.errors import InvalidRequest
from spindle.store import merged
from spindle.types import LoraConfig
from tests.tiny import VOCAB, tiny_llama, tiny_phi3, tiny_qwen3, tiny_qwen3_moe


def trained(base: BaseModel, **lora) -> Adapter:
    """An adapter all of whose entries do something."""
    adapter = Adapter(base.layout(LoraConfig(rank=4, seed=0, **lora))).init(0)
    generator = torch.Generator().manual_seed(1)
    for slot in adapter.layout.slots:
        adapter.params[slot.offset : slot.offset + slot.numel] += 0.05 * torch.randn(slot.numel, generator=generator)
    return adapter


@torch.no_grad()
def logits_with(base: BaseModel, adapter: Adapter | None, tokens: torch.Tensor) -> torch.Tensor:
    """[n, V] float32 through the adapter's own path."""
    groups = [] if adapter is None else [RowGroup(0, len(tokens), adapter.weights(base.dtype))]
    hidden = base.hidden(tokens, torch.arange(len(tokens)), Packing([len(tokens)]), groups)
    return base.logits(hidden, groups)


@pytest.mark.parametrize("shard_bytes", [1 << 30, 60_000])
@pytest.mark.parametrize(
    ("make", "options", "lora"),
    [
        (tiny_llama, {}, {}),
        (tiny_llama, {"tied": True}, {}),
        (tiny_qwen3, {"tied": True}, {"train_unembed": False}),
        (tiny_phi3, {}, {"train_mlp": False}),
        (tiny_qwen3_moe, {}, {}),
    ],
)
def test_transformers_computes_what_the_adapter_computes(tmp_path, monkeypatch, make, options, lora, shard_bytes):
    monkeypatch.setattr(merged, "SHARD_BYTES", shard_bytes)
    monkeypatch.setattr(merged, "BLOCK_ELEMENTS", 1000)  # many blocks a matrix, of a height that divides nothing
    base = BaseModel.load(make(**options))
    adapter = trained(base, **lora)
    tokens = torch.randint(2, VOCAB, (40,), generator=torch.Generator().manual_seed(2))
    expected = logits_with(base, adapter, tokens)
    assert (expected - logits_with(base, None, tokens)).abs().max() > 0.1  # the adapter does something
    merged.save_merged(tmp_path / "whole", base, adapter.layout, adapter.params)
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]
    files = sorted(path.name for path in (tmp_path / "whole").glob("*.safetensors"))
    assert (len(files) == 1) == (shard_bytes == 1 << 30), files
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    with torch.no_grad():
        assert (loaded.eval()(tokens[None]).logits[0] - expected).abs().max() <= 1e-4
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    assert config["tie_word_embeddings"] is (options.get("tied", False) and lora.get("train_unembed") is False)


def test_weights_keep_the_base_models_type(tmp_path):
    base = BaseModel.load(tiny_llama(), dtype=torch.bfloat16)
    adapter = trained(base)
    merged.save_merged(tmp_path / "whole", base, adapter.layout, adapter.params)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype="auto")
    a, b = adapter.weights().matrices["model.layers.1.mlp.up_proj"]
    plain = base.model.get_submodule("model.layers.1.mlp.up_proj").weight
    expected = (plain.float() + adapter.layout.scale * (b @ a)).bfloat16()
    assert torch.equal(loaded.model.layers[1].mlp.up_proj.weight, expected)
    assert torch.equal(loaded.model.embed_tokens.weight, base.decoder.embed_tokens.weight)


def test_one_tensor_at_a_time_is_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(merged, "BLOCK_ELEMENTS", 4096)
    base = BaseModel.load(tiny_llama())
    adapter = trained(base)
    blocks = []
    original = merged._merged

    def watched(tensor, delta, scale):
        for block in original(tensor, delta, scale):
            blocks.append(block.numel())
            yield block

    monkeypatch.setattr(merged, "_merged", watched)
    merged.save_merged(tmp_path / "whole", base, adapter.layout, adapter.params)
    assert max(blocks) <= 4096 and sum(blocks) == base.num_parameters


def test_an_export_that_fails_leaves_nothing(tmp_path, monkeypatch):
    base = BaseModel.load(tiny_llama())
    adapter = trained(base)
    monkeypatch.setattr(merged, "SHARD_BYTES", 60_000)
    original, calls = merged._write_shard, []

    def full(*args):
        calls.append(args)
        if len(calls) == 3:
            raise OSError("no space left on device")
        original(*args)

    monkeypatch.setattr(merged, "_write_shard", full)
    with pytest.raises(OSError, match="no space left"):
        merged.save_merged(tmp_path / "whole", base, adapter.layout, adapter.params)
    assert list(tmp_path.iterdir()) == []


def test_a_quantized_base_is_refused(tmp_path):
    base = BaseModel.load(tiny_llama())
    base.model.hf_quantizer = object()
    adapter = trained(base)
    with pytest.raises(InvalidRequest, match="a merged export needs a base model that is not quantized; export the adapter alone"):
        merged.save_merged(tmp_path / "whole", base, adapter.layout, adapter.params)
    assert not (tmp_path / "whole").exists()


@pytest.mark.parametrize("shard_bytes", [1 << 30, 60_000])
def test_a_whole_model_is_no_adapters_checkpoint(tmp_path, monkeypatch, shard_bytes):
    monkeypatch.setattr(merged, "SHARD_BYTES", shard_bytes)
    tiny_llama(save=tmp_path / "base")
    with Engine(tmp_path / "base", devices=["cpu"]) as engine:
        adapter = engine.create_adapter(rank=2, seed=0)
        adapter.save(tmp_path / "merged", merged=True).result()
        adapter.save(tmp_path / "state").result()
        for path in (tmp_path / "merged", tmp_path / "base"):
            for load in (lambda at: adapter.load(at).result(), lambda at: engine.create_adapter(rank=2, state=at), engine.open_snapshot):
                with pytest.raises(InvalidRequest) as error:
                    load(path)
                assert str(error.value) == (
                    f"{path} is a transformers model directory (a base model, or an adapter merged into one by save(..., merged=True)), "
                    "not a checkpoint of an adapter. Use it as a model: spindle serve, spindle.Engine and transformers load it. "
                    "Needed here is a directory that save(...) wrote without merged=True"
                )
        adapter.load(tmp_path / "state").result()  # which it still takes
