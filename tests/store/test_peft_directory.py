"""A directory that peft wrote: loaded where it means the same, refused by name where it does not."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

import spindle
from spindle import AdamParams, Datum, Engine
from spindle.compute.model import BaseModel
from spindle.errors import InvalidRequest, NotFound, ServerError
from spindle.store import peft_directory
from spindle.store.checkpoint import load_adapter, read_description, save_adapter
from tests.compute.helpers import random_adapter
from tests.tiny import VOCAB, tiny_llama, tiny_phi3, tiny_qwen3_moe

ATTN = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
TOKENS = np.random.default_rng(0).integers(2, VOCAB, 24)
DATA = [Datum(TOKENS[:-1], {"target_tokens": TOKENS[1:], "weights": np.ones(23, np.float32)})]
FLAGS = {"train_attn": True, "train_mlp": False, "train_unembed": False}
Q = "base_model.model.model.layers.0.self_attn.q_proj."


def write_peft(path: Path, model: Any = None, targets: Any = ATTN, dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    """A peft model whose B is not zero, saved to ``path``, in float64."""
    save = {"save_embedding_layers": False} if "lm_head" in targets else {}
    config = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.05, "task_type": "CAUSAL_LM"} | config
    made = peft.get_peft_model(model or tiny_llama(), peft.LoraConfig(target_modules=targets, **config)).eval()
    generator = torch.Generator().manual_seed(1)
    for name, p in made.named_parameters():
        if "lora_" in name:
            p.data = (p if "lora_A" in name else torch.empty(p.shape).normal_(0.0, 0.1, generator=generator)).to(dtype)
    made.save_pretrained(path, **save)
    return made.to(torch.float64)


def logprobs(model: Any) -> np.ndarray:
    if hasattr(model.config, "num_experts"):
        model.set_experts_implementation("eager")  # the grouped kernels know no float64
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(TOKENS[:-1])[None], use_cache=False).logits[0]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0].numpy()


def forward(adapter: Any) -> np.ndarray:
    return adapter.forward(DATA).result().loss_fn_outputs[0]["logprobs"]


STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
CASES = {
    "attn": (tiny_llama, {"targets": ATTN}, (True, False, False)),
    "mlp": (tiny_llama, {"targets": MLP}, (False, True, False)),
    "unembed": (tiny_llama, {"targets": ["lm_head"]}, (False, False, True)),
    "all": (tiny_llama, {"targets": [*ATTN, *MLP, "lm_head"]}, (True, True, True)),
    "all-linear": (tiny_llama, {"targets": "all-linear"}, (True, True, False)),  # written as a list of whole paths
    "fused": (tiny_phi3, {"targets": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]}, (True, True, False)),
    "experts": (tiny_qwen3_moe, {"targets": [], "target_parameters": STACKS, "lora_dropout": 0.0}, (False, True, False)),
    "tied": (lambda: tiny_llama(tied=True), {"targets": [*ATTN, "lm_head"]}, (True, False, True)),
    "gaussian": (tiny_llama, {"targets": ATTN, "init_lora_weights": "gaussian"}, (True, False, False)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_peft_there_and_back_again(tmp_path, case):
    make, config, kinds = CASES[case]
    theirs = logprobs(write_peft(tmp_path / "theirs", make(), **config))
    flags = dict(zip(FLAGS, kinds, strict=True))
    lora = read_description(tmp_path / "theirs")["lora"]
    assert lora == {"rank": 4, "alpha": 8.0, "seed": None, **flags}
    with Engine(BaseModel.load(make())) as engine:
        adapter = engine.create_adapter(rank=4, alpha=8, state=tmp_path / "theirs", **flags)
        other = engine.create_adapter(rank=4, alpha=8, seed=1, **flags)
        bare = forward(other)
        other.load(tmp_path / "theirs").result()
        assert np.abs(forward(adapter) - theirs).max() <= 1e-5
        assert np.array_equal(forward(other), forward(adapter))
        assert np.abs(bare - theirs).max() > 0.1
        greedy = spindle.SamplingParams(max_tokens=4, temperature=0.0, stop=[])
        snapshots = engine.open_snapshot(tmp_path / "theirs"), adapter.publish().result()
        assert torch.equal(snapshots[0].params, snapshots[1].params)
        sampled = [engine.sample(one, TOKENS[:5], greedy).result().sequences[0].tokens.tolist() for one in snapshots]
        assert sampled[0] == sampled[1]
        adapter.forward_backward(DATA)
        adapter.optim_step(AdamParams(learning_rate=1e-2))
        ours = forward(adapter)
        path = adapter.save(tmp_path / "ours").result()
    back = logprobs(peft.PeftModel.from_pretrained(make(), path).eval().to(torch.float64))
    assert np.abs(back - ours).max() <= 1e-5
    assert np.abs(ours - theirs).max() > 1e-2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_widened_without_loss(tmp_path, dtype):
    write_peft(tmp_path, dtype=dtype)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    layout = BaseModel.load(tiny_llama()).layout(spindle.LoraConfig(4, 8.0, None, **FLAGS))
    params = torch.from_numpy(load_adapter(tmp_path, layout).params)
    for slot in layout.slots:
        assert tensors[slot.name].dtype == dtype
        assert torch.equal(params[slot.offset : slot.offset + slot.numel].view(slot.shape).to(dtype), tensors[slot.name])
        assert params[slot.offset : slot.offset + slot.numel].abs().max() > 0


def test_without_a_layout_the_matrices_come_in_the_order_of_the_description(tmp_path):
    write_peft(tmp_path)
    loaded = load_adapter(tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    for name, shape, offset in read_description(tmp_path)["slots"]:
        assert loaded.params[offset : offset + tensors[name].numel()].tolist() == tensors[name].flatten().tolist()
        assert list(tensors[name].shape) == shape
    assert sum(t.numel() for t in tensors.values()) == loaded.params.size
    assert loaded.optimizer is None and loaded.lora.alpha == 8.0


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("peft") / "attn"
    write_peft(path)
    return path


@pytest.fixture
def saved(written, tmp_path):
    """A copy of what peft wrote of attention's adapter, to change."""
    return shutil.copytree(written, tmp_path / "saved")


def edit_config(path: Path, **changes: Any) -> None:
    config = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps(config | changes))


def edit_tensors(path: Path, change: Any) -> None:
    tensors = load_file(path / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, path / "adapter_model.safetensors")


def config_error(path: Path) -> str:
    with pytest.raises(InvalidRequest) as error:
        read_description(path)
    return str(error.value)


OFF = "null, false or empty: adapters have nothing like it here"
NAMES = "a list of the names (not a pattern) of what has LoRA matrices in the file"
INITS = 'true or false or null or "gaussian" or "orthogonal" or "eva"'


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("peft_type", "ADALORA", '"LORA"'),
        ("peft_type", None, '"LORA"'),
        ("task_type", "SEQ_CLS", '"CAUSAL_LM" or null'),
        ("bias", "lora_only", '"none" or null'),
        ("init_lora_weights", "pissa", INITS),
        ("init_lora_weights", "loftq", INITS),
        ("r", 0, "a whole number, 1 or more"),
        ("r", True, "a whole number, 1 or more"),
        ("r", 4.0, "a whole number, 1 or more"),
        ("r", None, "a whole number, 1 or more"),
        ("lora_alpha", "8", "a finite number"),
        ("lora_alpha", float("nan"), "a finite number"),
        ("lora_alpha", 10**400, "a finite number"),
        ("lora_alpha", None, "a finite number"),
        ("target_modules", ".*_proj", NAMES),
        ("target_modules", [["q_proj"]], NAMES),
        ("target_parameters", "experts.down_proj", NAMES),
        ("target_parameters", ["down_proj"], "names with their module's, as mlp.experts.down_proj"),
        ("use_rslora", True, OFF),
        ("use_dora", True, OFF),
        ("fan_in_fan_out", True, OFF),
        ("rank_pattern", {"q_proj": 8}, OFF),
        ("alpha_pattern", {"q_proj": 16}, OFF),
        ("modules_to_save", ["embed_tokens"], OFF),
        ("lora_bias", True, OFF),
        ("layers_to_transform", 0, OFF),
        ("layers_to_transform", [0], OFF),
        ("trainable_token_indices", [5], OFF),
        ("layer_replication", [[0, 2], [1, 2]], OFF),
        ("exclude_modules", ["lm_head"], OFF),
        ("ensure_weight_tying", True, OFF),
        ("alora_invocation_tokens", [1], OFF),
        ("use_qalora", True, OFF),
        ("something_peft_adds_later", 1, OFF),
    ],
)
def test_what_means_something_else_is_refused_by_name(saved, key, value, allowed):
    edit_config(saved, **{key: value})
    assert config_error(saved) == f"adapter_config.json: {key} is {json.dumps(value)[:200]}; allowed is {allowed}"


def test_a_key_that_peft_adds_later_may_be_off(saved):
    edit_config(saved, something_new=False, another={}, base_model_name_or_path="org/base")
    assert read_description(saved)["base_model"] == "org/base"


def test_the_keys_are_pefts():
    assert {*peft_directory._ALLOWED, *peft_directory._READ, *peft_directory._SAYS_NOTHING} <= peft.LoraConfig().to_dict().keys()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_peft_saves_beside_the_matrices_is_refused(tmp_path):
    for key, value in {"use_dora": True, "modules_to_save": ["norm"], "lora_bias": True}.items():
        write_peft(tmp_path / key, **{key: value})
        assert config_error(tmp_path / key).startswith(f"adapter_config.json: {key} is ")


def test_a_copy_of_the_base_models_own_weights_is_refused(tmp_path):
    model = peft.get_peft_model(tiny_llama(), peft.LoraConfig(r=4, target_modules=["lm_head"], task_type="CAUSAL_LM"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(tmp_path)
    assert config_error(tmp_path) == (
        "adapter_model.safetensors holds base_model.model.lm_head.base_layer.weight, a copy of the base model's own weights: save it again "
        "with save_pretrained(..., save_embedding_layers=False)"
    )


def test_a_tensor_of_another_kind_is_refused(saved):
    edit_tensors(saved, lambda tensors: tensors.update({Q + "lora_magnitude_vector": torch.ones(64), "z": torch.ones(1)}))
    assert config_error(saved) == (
        f"adapter_model.safetensors holds {Q}lora_magnitude_vector, not a LoRA matrix: allowed are "
        "base_model.model.<module>.lora_A.weight and .lora_B.weight"
    )


def test_half_a_pair_is_refused(saved):
    edit_tensors(saved, lambda tensors: tensors.pop(Q + "lora_B.weight"))
    assert config_error(saved) == f"adapter_model.safetensors lacks {Q}lora_B.weight: it holds only {Q}lora_A.weight"


def test_no_matrix_at_all_is_refused(saved):
    edit_tensors(saved, lambda tensors: tensors.clear())
    assert config_error(saved) == "adapter_model.safetensors holds no LoRA matrix"


@pytest.mark.parametrize(("end", "shape"), [("lora_A", [3, 64]), ("lora_B", [64, 6]), ("lora_A", [4]), ("lora_A", [0, 64])])
def test_a_matrix_of_another_rank_than_the_config_says_is_refused(saved, end, shape):
    edit_tensors(saved, lambda tensors: tensors.update({f"{Q}{end}.weight": torch.ones(shape)}))
    want = f"adapter_model.safetensors: {Q}{end}.weight has shape {shape}, which is none of rank 4 (r in adapter_config.json)"
    assert config_error(saved) == want


def test_names_and_matrices_must_agree(saved):
    edit_config(saved, target_modules=[*ATTN, "c_attn"])
    want = "adapter_model.safetensors lacks matrices of c_attn, which target_modules or target_parameters in adapter_config.json name"
    assert config_error(saved) == want
    edit_config(saved, target_modules=["k_proj", "v_proj", "o_proj"])
    assert config_error(saved) == (
        "adapter_model.safetensors holds matrices of model.layers.0.self_attn.q_proj, which target_modules and target_parameters in "
        "adapter_config.json do not name"
    )
    edit_config(saved, target_modules=None)
    assert "holds matrices of model.layers.0.self_attn.k_proj" in config_error(saved)


@pytest.fixture(scope="module")
def engine():
    with Engine(BaseModel.load(tiny_llama())) as made:
        yield made


def fit_error(engine: Engine, path: Path, **shape: Any) -> str:
    """The same from a new adapter and from a load into one, which stays as it was."""
    texts = []
    adapter = engine.create_adapter(**shape)
    before = engine.resident(adapter.model_id).adapter.params.clone()
    for load in (lambda: engine.create_adapter(**shape, state=path), lambda: adapter.load(path).result()):
        with pytest.raises(InvalidRequest) as error:
            load()
        texts.append(str(error.value))
    assert texts[0] == texts[1]
    assert torch.equal(engine.resident(adapter.model_id).adapter.params, before)
    adapter.unload()
    return texts[0]


@pytest.mark.parametrize("ours", [False, True])
def test_rank_and_alpha_must_be_equal(tmp_path, saved, engine, ours):
    path = saved
    if ours:
        path = engine.create_adapter(rank=4, alpha=8.0, **FLAGS).save(tmp_path / "ours").result()
    assert fit_error(engine, path, rank=4, alpha=32.0, **FLAGS) == (
        "alpha: the checkpoint's is 8.0, this adapter's 32.0; they must be equal: create the adapter with alpha=8.0"
    )
    assert fit_error(engine, path, rank=8, alpha=8.0, **FLAGS) == (
        "rank: the checkpoint's is 4, this adapter's 8; they must be equal: create the adapter with rank=4"
    )


def test_flags_that_differ_are_named(saved, engine):
    assert fit_error(engine, saved, rank=4, alpha=8.0) == (
        "adapter_model.safetensors lacks base_model.model.lm_head.lora_A.weight (14 missing, 0 unknown tensors); it is of an adapter with "
        "train_attn=True, train_mlp=False, train_unembed=False, this one has train_attn=True, train_mlp=True, train_unembed=True: create "
        "it with the checkpoint's"
    )


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"targets": ["q_proj", "v_proj"]}, "lacks base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight (8 missing, 0 unknown"),
        (
            {"targets": ATTN, "layers_to_transform": [0]},
            "lacks base_model.model.model.layers.1.self_attn.k_proj.lora_A.weight (8 missing, 0 unknown",
        ),
    ],
    ids=["modules", "layers"],
)
def test_a_part_of_what_the_flags_give_is_refused(tmp_path, engine, config, what):
    write_peft(tmp_path, **config)
    edit_config(tmp_path, layers_to_transform=None)
    want = (
        f"adapter_model.safetensors {what} tensors); with train_attn=True, train_mlp=False, train_unembed=False an adapter has q_proj, "
        "k_proj, v_proj, o_proj in every layer and nothing else: no choice of the three gives what target_modules names"
    )
    assert fit_error(engine, tmp_path, rank=4, alpha=8.0, **FLAGS) == want
    with pytest.raises(InvalidRequest) as error:
        engine.open_snapshot(tmp_path)
    assert str(error.value) == want


def test_a_module_that_is_never_adapted_is_refused(saved, engine):
    more = {f"base_model.model.model.layers.0.self_attn.gate.lora_{end}.weight": torch.ones(4, 4) for end in "AB"}
    edit_tensors(saved, lambda tensors: tensors.update(more))
    edit_config(saved, target_modules=[*ATTN, "gate"])
    with pytest.raises(
        InvalidRequest, match=r"holds .*self_attn\.gate\.lora_A\.weight, which this adapter does not have \(0 missing, 2 unk"
    ):
        engine.open_snapshot(saved)


def test_another_models_adapter_does_not_fit(tmp_path, engine):
    write_peft(tmp_path, tiny_llama(hidden_size=32))
    with pytest.raises(InvalidRequest, match=r"q_proj\.lora_A\.weight has shape \[4, 32\], this adapter needs \[4, 64\]"):
        engine.open_snapshot(tmp_path)


def test_numbers_that_float32_may_not_hold_are_refused(tmp_path, engine):
    write_peft(tmp_path, dtype=torch.float64)
    with pytest.raises(InvalidRequest, match=r"safetensors: .*q_proj\.lora_A\.weight is of type F64; allowed are F32, F16, BF16"):
        engine.open_snapshot(tmp_path)


def test_there_is_no_optimizer_state(saved, engine):
    with pytest.raises(InvalidRequest) as error:
        engine.create_adapter(rank=4, alpha=8.0, **FLAGS, state=saved, with_optimizer=True)
    assert str(error.value) == f"{saved} was written by peft, which keeps no optimizer state: load its weights only"


@pytest.mark.parametrize("left", ["adapter_config.json", "adapter_model.safetensors", None])
def test_both_files_are_needed(saved, left):
    names = {"adapter_config.json", "adapter_model.safetensors"}
    for name in names - {left}:
        (saved / name).unlink()
    with pytest.raises(NotFound) as error:
        read_description(saved)
    beside = f": it holds {left} but no {(names - {left}).pop()}" if left else ""
    assert str(error.value) == f"no checkpoint at {saved}{beside}"


@pytest.mark.parametrize("damage", [b'{"peft_type": "LO', b"\xff\xfe\xfa", b"[" * 100_000, b"[1]", b"null"])
def test_a_damaged_config_says_which_file(saved, damage):
    (saved / "adapter_config.json").write_bytes(damage)
    with pytest.raises(ServerError, match=r"adapter_config\.json is damaged: ."):
        read_description(saved)


@pytest.mark.parametrize("damage", [lambda old: old[:-4], lambda old: old[:20], lambda old: b"", lambda old: b"\xff" * 64])
def test_damaged_weights_say_which_file_and_load_nothing(saved, engine, damage):
    file = saved / "adapter_model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    adapter = engine.create_adapter(rank=4, alpha=8.0, seed=1, **FLAGS)
    before = engine.resident(adapter.model_id).adapter.params.clone()
    for load in (lambda: adapter.load(saved).result(), lambda: engine.open_snapshot(saved)):
        with pytest.raises(ServerError, match=r"cannot read .*adapter_model\.safetensors"):
            load()
    assert torch.equal(engine.resident(adapter.model_id).adapter.params, before)
    held = engine.stats()["adapters"]
    with pytest.raises(ServerError):
        engine.create_adapter(rank=4, alpha=8.0, **FLAGS, state=saved, model_id="half")
    assert engine.stats()["adapters"] == held
    engine.create_adapter(rank=4, model_id="half").unload()  # the name is free


def test_our_own_checkpoint_without_its_description_is_pefts(tmp_path):
    adapter = random_adapter(BaseModel.load(tiny_llama()), spindle.LoraConfig(rank=4))
    save_adapter(tmp_path / "a", adapter.layout, adapter.params, "org/tiny")
    (tmp_path / "a" / "spindle.json").unlink()
    loaded = load_adapter(tmp_path / "a", adapter.layout)
    assert np.array_equal(loaded.params, adapter.params.numpy())
    assert (loaded.lora, loaded.base_model) == (spindle.LoraConfig(rank=4), "org/tiny")
