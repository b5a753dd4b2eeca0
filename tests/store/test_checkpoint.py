"""Adapters on disk: what is written is what is read, whole or absent."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from spindle.errors import InvalidRequest, NotFound, ServerError
from spindle.store import files
from spindle.store.checkpoint import load_adapter, save_adapter
from spindle.types import LoraConfig


@dataclass(frozen=True)
class Slot:
    name: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Layout:
    lora: LoraConfig
    slots: tuple[Slot, ...]
    numel: int
    target_modules: tuple[str, ...] = ("q_proj",)
    target_parameters: tuple[str, ...] = ()


PREFIX = "base_model.model.model.layers.0.self_attn.q_proj."
LAYOUT = Layout(LoraConfig(rank=2, seed=5), (Slot(PREFIX + "lora_A.weight", (2, 3), 0), Slot(PREFIX + "lora_B.weight", (4, 2), 8)), 16)
PARAMS = np.arange(16, dtype=np.float32) / 7


def save(path, **changes):
    save_adapter(path, **{"layout": LAYOUT, "params": PARAMS, "base_model": "org/tiny", **changes})


def used(flat: np.ndarray) -> list[float]:
    return [*flat[:6].tolist(), *flat[8:16].tolist()]


def test_weights_come_back_with_every_field(tmp_path):
    save(tmp_path / "a", params=torch.from_numpy(PARAMS), metadata={"note": "x"})
    loaded = load_adapter(tmp_path / "a")
    assert used(loaded.params) == used(PARAMS)
    assert loaded.lora == LAYOUT.lora
    assert loaded.base_model == "org/tiny"
    assert loaded.metadata == {"note": "x"}
    assert loaded.optimizer is None


def test_optimizer_state_comes_back(tmp_path):
    save(tmp_path / "a", optimizer=(PARAMS * 2, PARAMS * 3, 17))
    state = load_adapter(tmp_path / "a", LAYOUT, with_optimizer=True).optimizer
    assert used(state.exp_avg) == used(PARAMS * 2)
    assert used(state.exp_avg_sq) == used(PARAMS * 3)
    assert state.step == 17


def test_the_file_is_plain_safetensors_under_peft_names(tmp_path):
    save(tmp_path / "a")
    tensors = load_file(tmp_path / "a" / "adapter_model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        PREFIX + "lora_A.weight": (2, 3),
        PREFIX + "lora_B.weight": (4, 2),
    }
    assert tensors[PREFIX + "lora_B.weight"].flatten().tolist() == PARAMS[8:].tolist()
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (2, 32.0, ["q_proj"])


def test_another_order_of_slots_reads_the_same_matrices(tmp_path):
    save(tmp_path / "a")
    swapped = Layout(LAYOUT.lora, (Slot(LAYOUT.slots[1].name, (4, 2), 0), Slot(LAYOUT.slots[0].name, (2, 3), 8)), 14)
    params = load_adapter(tmp_path / "a", swapped).params
    assert params.tolist() == [*PARAMS[8:16].tolist(), *PARAMS[:6].tolist()]


def test_loading_without_saved_optimizer_state_is_a_user_error(tmp_path):
    save(tmp_path / "a")
    with pytest.raises(InvalidRequest, match="saved without optimizer state"):
        load_adapter(tmp_path / "a", with_optimizer=True)


def test_an_adapter_of_another_rank_does_not_fit(tmp_path):
    save(tmp_path / "a")
    other = Layout(LoraConfig(rank=1), (Slot(LAYOUT.slots[0].name, (1, 3), 0), Slot(LAYOUT.slots[1].name, (4, 1), 3)), 7)
    with pytest.raises(InvalidRequest, match=r"rank: the checkpoint's is 2, this adapter's 1; they must be equal"):
        load_adapter(tmp_path / "a", other)


def test_an_adapter_of_another_alpha_would_be_scaled_otherwise(tmp_path):
    save(tmp_path / "a")
    other = replace(LAYOUT, lora=replace(LAYOUT.lora, alpha=16.0))
    with pytest.raises(InvalidRequest) as error:
        load_adapter(tmp_path / "a", other)
    assert str(error.value) == (
        "alpha: the checkpoint's is 32.0, this adapter's 16.0; they must be equal: create the adapter with alpha=32.0"
    )


def test_an_adapter_of_other_shapes_does_not_fit(tmp_path):
    save(tmp_path / "a")
    other = replace(LAYOUT, slots=(Slot(LAYOUT.slots[0].name, (2, 5), 0), LAYOUT.slots[1]))
    with pytest.raises(InvalidRequest, match=r"lora_A.weight has shape \[2, 3\], this adapter needs \[2, 5\]"):
        load_adapter(tmp_path / "a", other)


def test_an_adapter_of_other_modules_does_not_fit(tmp_path):
    save(tmp_path / "a")
    with pytest.raises(InvalidRequest, match=r"holds .*lora_B.weight, which this adapter does not have"):
        load_adapter(tmp_path / "a", Layout(LAYOUT.lora, LAYOUT.slots[:1], 6))


def test_a_missing_checkpoint_is_not_found(tmp_path):
    with pytest.raises(NotFound, match="no checkpoint at"):
        load_adapter(tmp_path / "nothing")


def test_a_file_of_a_checkpoint_is_none(tmp_path):
    save(tmp_path / "a")
    with pytest.raises(NotFound, match=r"no checkpoint at .*/a/adapter_model\.safetensors"):
        load_adapter(tmp_path / "a" / "adapter_model.safetensors")


def test_an_adapter_beside_a_config_is_not_taken_for_a_model(tmp_path):
    save(tmp_path / "a")
    (tmp_path / "a" / "config.json").write_text("{}")
    assert load_adapter(tmp_path / "a").lora == LAYOUT.lora
    for name in ("spindle.json", "adapter_config.json"):
        (tmp_path / "a" / name).unlink()
    with pytest.raises(NotFound, match="no checkpoint at"):
        load_adapter(tmp_path / "a")


def test_a_damaged_checkpoint_says_which_file(tmp_path):
    save(tmp_path / "a")
    file = tmp_path / "a" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ServerError, match=r"cannot read .*adapter_model\.safetensors"):
        load_adapter(tmp_path / "a")


def test_saving_over_an_existing_checkpoint_must_be_asked_for(tmp_path):
    save(tmp_path / "a")
    with pytest.raises(InvalidRequest, match="already exists"):
        save(tmp_path / "a")
    save(tmp_path / "a", params=PARAMS * 2, replace=True)
    assert used(load_adapter(tmp_path / "a").params) == used(PARAMS * 2)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_save_that_fails_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("spindle.store.checkpoint._peft_config", lambda *_: {"bad": object()})
    with pytest.raises(TypeError):
        save(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def die_while_replacing(target: Path, last: int, renames: bool) -> int:
    """In a child that ends at step ``last``, before or after a call that changes the disk. Its exit code; 0 when there are fewer steps."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    steps = 0

    def dying(function):
        def call(*args, **kwargs):
            nonlocal steps
            for moment in ("before", "after"):
                steps += 1
                if steps == last:
                    os._exit(7)
                if moment == "before":
                    result = function(*args, **kwargs)
            return result

        return call

    if renames:
        files._renameat2 = None
    for where, name in ((files, "_exchange"), (files, "_sync"), (os, "rename"), (shutil, "rmtree")):
        setattr(where, name, dying(getattr(where, name)))
    with files.new_directory(target, replace=True) as directory:
        for name in ("a", "b"):
            (directory / name).write_text("new")
    os._exit(0)


@pytest.mark.parametrize("way", ["exchange", "renames"])
def test_a_process_that_dies_while_replacing_leaves_a_whole_checkpoint(tmp_path, way):
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    if way == "exchange" and not files._exchange(one, other):
        pytest.skip("this system cannot exchange two directories in one step")
    found, code = [], 7
    while code == 7:
        root = tmp_path / str(len(found))
        target = root / "state"
        target.mkdir(parents=True)
        for name in ("a", "b"):
            (target / name).write_text("old")
        code = die_while_replacing(target, len(found) + 1, renames=way == "renames")
        texts = {(target / name).read_text() if (target / name).exists() else None for name in ("a", "b")}
        assert len(texts) == 1, (len(found), texts)  # never a mixture
        found += texts
        files.sweep_temporary(root)
        assert [path.name for path in root.iterdir()] == (["state"] if texts != {None} else [])
    assert code == 0 and len(found) > 10
    assert "old" in found and found[-1] == "new"
    assert (None in found) is (way == "renames")  # what the exchange is for
