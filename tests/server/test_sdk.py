"""The unmodified SDK against the server: everything a training script does."""

from __future__ import annotations

import numpy as np
import pytest
import tinker
import torch
from tinker import types

from tests.server.conftest import NAME
from tests.tiny import VOCAB


def datum(length: int, seed: int = 0, **inputs) -> types.Datum:
    tokens = np.random.default_rng(seed).integers(2, VOCAB, length + 1)
    values = {"target_tokens": tokens[1:], "weights": np.ones(length, np.float32)} | inputs
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1].tolist()), loss_fn_inputs=values)


def adam(rate: float = 0.01) -> types.AdamParams:
    return types.AdamParams(learning_rate=rate)


@pytest.fixture
def training(service):
    return service.create_lora_training_client(NAME, rank=4, seed=1).result()


def loss(training, data) -> float:
    return training.forward(data, "cross_entropy").result().metrics["loss:sum"]


def test_training_lowers_the_loss(training):
    data = [datum(12)]
    losses = []
    for _ in range(6):
        forward_backward, step = training.forward_backward(data, "cross_entropy"), training.optim_step(adam())
        losses.append(forward_backward.result().metrics["loss:sum"])
        assert step.result().metrics["grad_norm"] > 0
    assert losses[-1] < 0.5 * losses[0]


def test_logprobs_equal_those_of_transformers(training, model):
    tokens = np.random.default_rng(0).integers(2, VOCAB, 10)
    one = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1].tolist()),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": np.ones(9, np.float32)},
    )
    ours = training.forward([one], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_torch()
    from tests.tiny import tiny_llama

    with torch.no_grad():
        logits = tiny_llama()(torch.tensor(tokens[:-1])[None]).logits[0]
    expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    assert torch.allclose(ours, expected, atol=1e-5)


def test_raw_2d_tensors_travel_as_csr_and_come_back_dense(training):
    targets, weights = torch.zeros(40, 5, dtype=torch.int64), torch.zeros(40, 5)
    targets[17], weights[17] = torch.tensor([5, 6, 7, 8, 9]), torch.tensor([0.1, 0.2, 0.3, 0.2, 0.2])
    one = datum(40, target_tokens=targets, weights=weights)
    assert one.loss_fn_inputs["target_tokens"].sparse_crow_indices is not None
    output = training.forward_backward([one], "cross_entropy").result()
    logprobs = output.loss_fn_outputs[0]["logprobs"].to_torch()
    assert logprobs.shape == (40, 5)
    assert output.metrics["loss:sum"] == pytest.approx(-(weights * logprobs).sum().item(), rel=1e-5)


def test_a_call_of_many_chunks_is_one_answer_in_input_order(service, training, monkeypatch):
    config = training.holder._client_config.model_copy(update={"fwdbwd_max_chunk_len": 2})
    monkeypatch.setattr(training.holder, "_client_config", config)
    data = [datum(length, length) for length in (3, 9, 4, 6, 5)]
    output = training.forward_backward(data, "cross_entropy").result()
    assert [item["logprobs"].shape for item in output.loss_fn_outputs] == [[3], [9], [4], [6], [5]]
    assert output.metrics["loss:sum"] == pytest.approx(sum(loss(training, [one]) for one in data), rel=1e-5)


def test_a_bad_chunk_among_good_ones_fails_the_call_and_leaves_no_hole(training, monkeypatch):
    config = training.holder._client_config.model_copy(update={"fwdbwd_max_chunk_len": 1})
    monkeypatch.setattr(training.holder, "_client_config", config)
    data = [datum(4), datum(4, weights=np.ones(3, np.float32)), datum(4)]
    with pytest.raises(tinker.RequestFailedError, match="weights") as failure:
        training.forward_backward(data, "cross_entropy").result(timeout=30)
    assert failure.value.category.value == "user"
    assert loss(training, [datum(4)]) > 0


def test_a_saved_state_continues_bit_for_bit(service, training):
    data = [datum(12)]
    training.forward_backward(data, "cross_entropy")
    training.optim_step(adam()).result()
    path = training.save_state("halfway").result().path
    resumed = service.create_training_client_from_state_with_optimizer(path).result()
    for client in (training, resumed):
        client.forward_backward(data, "cross_entropy")
        client.optim_step(adam()).result()
    assert loss(resumed, data) == loss(training, data)
    assert resumed.get_info().lora_rank == 4


def test_a_state_loaded_without_optimizer_starts_its_moments_afresh(service, training, engine):
    training.forward_backward([datum(12)], "cross_entropy")
    training.optim_step(adam()).result()
    path = training.save_state("weights-only").result().path
    fresh = service.create_training_client_from_state(path).result()
    assert loss(fresh, [datum(12)]) == loss(training, [datum(12)])
    assert engine.resident(fresh.model_id).adapter.step == 0


def test_load_state_into_a_living_client(service, training):
    data = [datum(12)]
    before = loss(training, data)
    path = training.save_state("start").result().path
    training.forward_backward(data, "cross_entropy")
    training.optim_step(adam()).result()
    assert loss(training, data) != before
    with pytest.warns(FutureWarning):
        training.load_state(path).result()
    assert loss(training, data) == before


def test_overwriting_a_state_must_be_asked_for(training):
    training.save_state("latest").result()
    with pytest.raises(tinker.RequestFailedError, match="exists already: choose another name, or overwrite it"):
        training.save_state("latest").result()
    assert training.save_state("latest", overwrite=True).result().path.endswith("/weights/latest")


def test_published_weights_never_change(training):
    data = [datum(12)]
    sampler = training.save_weights_and_get_sampling_client().result()
    prompt = data[0].model_input
    before = sampler.compute_logprobs(prompt).result()
    training.forward_backward(data, "cross_entropy")
    training.optim_step(adam(0.1)).result()
    assert sampler.compute_logprobs(prompt).result() == before
    after = training.save_weights_and_get_sampling_client().result().compute_logprobs(prompt).result()
    assert max(abs(a - b) for a, b in zip(after[1:], before[1:], strict=True)) > 1e-3


def test_named_sampler_weights_score_as_the_trainer_does(service, training):
    data = [datum(12)]
    training.forward_backward(data, "cross_entropy")
    training.optim_step(adam()).result()
    path = training.save_weights_for_sampler("scored").result().path
    sampler = service.create_sampling_client(model_path=path).result()
    assert sampler.get_base_model() == NAME
    prompt = data[0].model_input.to_ints()
    scored = sampler.compute_logprobs(types.ModelInput.from_ints(prompt)).result()
    trainer = training.forward(
        [
            types.Datum(
                types.ModelInput.from_ints(prompt[:-1]), {"target_tokens": np.array(prompt[1:]), "weights": np.ones(len(prompt) - 1)}
            )
        ],
        "cross_entropy",
    ).result()
    assert scored[0] is None
    assert scored[1:] == pytest.approx(trainer.loss_fn_outputs[0]["logprobs"].to_numpy().tolist(), abs=1e-4)


def test_weights_of_one_path_are_read_once(service, training, engine, monkeypatch):
    path = training.save_weights_for_sampler("shared").result().path
    opened = []
    read = engine.open_snapshot
    monkeypatch.setattr(engine, "open_snapshot", lambda files: opened.append(files) or read(files))
    for _ in range(3):
        sampler = service.create_sampling_client(model_path=path).result()
        assert len(sampler.sample(types.ModelInput.from_ints([5]), 1, types.SamplingParams(max_tokens=1)).result().sequences) == 1
    assert len(opened) == 1


def test_inflight_samplers_move_to_the_newest_weights(training):
    prompt = datum(12).model_input
    first = training.save_weights_and_get_sampling_client(kind="inflight").result()
    before = first.compute_logprobs(prompt).result()
    training.forward_backward([datum(12)], "cross_entropy")
    training.optim_step(adam(0.1)).result()
    second = training.save_weights_and_get_sampling_client(kind="inflight").result()
    assert first.compute_logprobs(prompt).result() == second.compute_logprobs(prompt).result() != before


def test_sampling_the_base_model(service):
    sampler = service.create_sampling_client(base_model=NAME).result()
    prompt = types.ModelInput.from_ints([5, 6, 7])
    params = types.SamplingParams(max_tokens=5, temperature=1.0, seed=3)
    first, again = (sampler.sample(prompt, 3, params).result() for _ in range(2))
    assert [item.tokens for item in first.sequences] == [item.tokens for item in again.sequences]
    assert len({tuple(item.tokens) for item in first.sequences}) > 1
    assert len({item.sequence_id for item in first.sequences}) == 3
    assert all(len(item.logprobs) == len(item.tokens) for item in first.sequences)


def test_train_flags_and_rank_reach_the_adapter(service, engine):
    client = service.create_lora_training_client(NAME, rank=8, train_mlp=False, train_unembed=False).result()
    layout = engine.resident(client.model_id).adapter.layout
    assert layout.lora.rank == 8
    assert {slot.name.split(".")[-4] for slot in layout.slots} == {"self_attn"}


def test_names_and_aliases(service):
    names = [
        item.model_name
        for item in tinker.RestClient(base_url=service.holder._base_url, api_key="tml-x")
        .get_server_capabilities()
        .result()
        .supported_models
    ]
    assert names == [NAME, "spindle/alias"]
    client = service.create_lora_training_client("spindle/alias:peft:262144", rank=2).result()
    assert client.get_info().model_data.model_name == "spindle/alias"
    with pytest.raises(
        tinker.BadRequestError, match="base_model 'org/other' is not served here; this server has: spindle/tiny, spindle/alias"
    ):
        service.create_lora_training_client("org/other").result()


def test_user_errors_end_at_once(service, training):
    with pytest.raises(tinker.RequestFailedError, match="rank"):
        service.create_lora_training_client(NAME, rank=0).result()
    with pytest.raises(tinker.RequestFailedError, match=r"beta1 is 2\.0, allowed is 0 up to but not 1"):
        training.optim_step(types.AdamParams(beta1=2.0)).result()
    with pytest.raises(tinker.RequestFailedError, match="checkpoint name 'a/b' is not allowed"):
        training.save_state("a/b").result()
    with pytest.raises(tinker.NotFoundError, match="no checkpoint tinker://"):
        service.create_training_client_from_state(f"tinker://{training.model_id}/weights/none").result()
    with pytest.raises(tinker.RequestFailedError, match="loss_fn 'none'"):
        training.forward([datum(3)], "none").result()
    assert loss(training, [datum(3)]) > 0


def test_client_side_custom_losses_run_through_the_server(training):
    data = [datum(6), datum(4, 1)]

    def squared(data, logprobs):
        return sum((item**2).sum() for item in logprobs), {"seen": float(len(data))}

    output = training.forward_backward_custom(data, squared).result()
    expected = sum(
        float((item["logprobs"].to_torch() ** 2).sum()) for item in training.forward(data, "cross_entropy").result().loss_fn_outputs
    )
    assert output.metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)
    assert training.optim_step(adam()).result().metrics["grad_norm"] > 0
