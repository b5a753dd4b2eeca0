"""How much of a training step is not compute, for the classifier workload through the real SDK over loopback?

A step is two forward, one forward_backward and one optim_step, each awaited. The floor is the same client, doing the same, against a
server that answers canned bytes at once: what the SDK alone costs. Rounds alternate between the two, and medians are compared.
"""

from __future__ import annotations

import statistics
import time

import numpy as np
import pytest
import servers
import tinker
import torch

DATUMS = 128
WIDTH = 5
ROUNDS = 7
FLOORS = 3  # of each round: they are short, and the machine's speed wanders
BAR = 1.25


def classifier_data() -> list[tinker.Datum]:
    """128 datums of about 1,631 tokens (sd 200), Zipf ids; [N, 5] target_tokens and weights with one labelled row, which the SDK sends
    as CSR because they are raw torch tensors."""
    rng = np.random.default_rng(7)
    data = []
    for length in np.clip(rng.normal(1631, 200, DATUMS).astype(int), 64, servers.CONTEXT):
        tokens = (rng.zipf(1.2, length) - 1) % servers.VOCAB
        targets, weights = torch.zeros((length, WIDTH), dtype=torch.int64), torch.zeros((length, WIDTH))
        targets[-1] = torch.tensor(rng.choice(np.arange(1, servers.VOCAB), WIDTH, replace=False))
        weights[-1] = torch.tensor([1.0, -0.25, -0.25, -0.25, -0.25])
        data.append(
            tinker.Datum(
                model_input=tinker.ModelInput.from_ints(tokens.tolist()), loss_fn_inputs={"target_tokens": targets, "weights": weights}
            )
        )
    return data


class Client:
    def __init__(self, url: str) -> None:
        self.service = tinker.ServiceClient(base_url=url, api_key=servers.KEY)
        self.training = self.service.create_lora_training_client(base_model=servers.NAME, rank=8, seed=0).result()

    def step(self, data: list[tinker.Datum]) -> tuple[float, list[tinker.ForwardBackwardOutput]]:
        """-> seconds of the step, its three answers."""
        began = time.perf_counter()
        answers = [self.training.forward(data, "cross_entropy").result() for _ in range(2)]
        answers.append(self.training.forward_backward(data, "cross_entropy").result())
        self.training.optim_step(tinker.AdamParams(learning_rate=1e-4)).result()
        return time.perf_counter() - began, answers


@pytest.fixture(scope="module")
def data() -> list[tinker.Datum]:
    return classifier_data()


@pytest.fixture
def spindle(tmp_path):
    with servers.started("spindle", str(tmp_path / "store")) as url:
        client = Client(url)
        client.url = url
        yield client
        client.service.close("success").result(30)


@pytest.fixture
def stub(data, tmp_path):
    canned = tmp_path / "answer.bin"
    canned.write_bytes(servers.canned_answer([one.model_input.length for one in data], WIDTH))
    with servers.started("stub", str(canned)) as url:
        client = Client(url)
        yield client
        client.service.close("success").result(30)


def check(data: list[tinker.Datum], answer: tinker.ForwardBackwardOutput) -> None:
    """Every datum's logprobs have its targets' shape, and Σ −w·p over them is the loss that came with them."""
    loss = 0.0
    for one, output in zip(data, answer.loss_fn_outputs, strict=True):
        logprobs = output["logprobs"].to_numpy()
        assert logprobs.shape == (one.model_input.length, WIDTH)
        loss -= float((logprobs[-1] * one.loss_fn_inputs["weights"].to_torch().to_dense()[-1].numpy()).sum())
    assert answer.metrics["loss:sum"] == pytest.approx(loss, rel=1e-4, abs=1e-2)


@pytest.mark.timeout(900)
def test_outside_over_floor(benchmark, figures, data, spindle, stub):
    steps, computes, floors = [], [], []

    def floor() -> None:
        floors.extend(stub.step(data)[0] for _ in range(FLOORS))

    def step() -> list[tinker.ForwardBackwardOutput]:
        before = servers.engine_stats(spindle.url)["compute_s"]
        seconds, answers = spindle.step(data)
        steps.append(seconds)
        computes.append(servers.engine_stats(spindle.url)["compute_s"] - before)
        return answers

    answers = benchmark.pedantic(step, setup=floor, rounds=ROUNDS, warmup_rounds=1)
    for answer in answers:
        check(data, answer)
    assert answers[0].metrics["loss:sum"] == answers[1].metrics["loss:sum"]  # forward twice, nothing between
    floor_s = statistics.median(floors[FLOORS:])
    outside_s = statistics.median(step - compute for step, compute in zip(steps[1:], computes[1:], strict=True))
    figures["outside_over_floor"] = outside_s / floor_s
    figures["floor_s"] = floor_s
    figures["step_s"] = statistics.median(steps[1:])
    figures["compute_s"] = statistics.median(computes[1:])
    figures["outside_s"] = outside_s
    assert outside_s / floor_s <= BAR
