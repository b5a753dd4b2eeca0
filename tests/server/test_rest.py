"""RestClient, downloads, sessions, custom losses and retrieve_futures through the stock SDK."""

from __future__ import annotations

import asyncio
import gc
import importlib
import io
import json
import multiprocessing
import pickle
import tarfile

import httpx
import numpy as np
import pytest
import tinker
import torch
from starlette.responses import Response
from tinker import types
from tinker.lib.public_interfaces.rest_client import RestClient
from transformers import AutoModelForCausalLM

from spindle.errors import NotFound
from spindle.server import ServerSettings, create_app, running
from tests.server.conftest import NAME
from tests.server.test_sdk import adam, datum
from tests.server.wire import Wire
from tests.server.wire import datum as wire_datum

KEY = "tml-test-key"


@pytest.fixture
def rest(url):
    return RestClient(base_url=url, api_key=KEY)


@pytest.fixture
def training(service):
    return service.create_lora_training_client(NAME, rank=4, seed=1, user_metadata={"purpose": "test"}).result()


def test_training_runs_are_listed_in_pages(rest, service, training):
    second = service.create_lora_training_client(NAME, rank=2).result()
    page = rest.list_training_runs(limit=2).result()
    assert [run.training_run_id for run in page.training_runs] == [second.model_id, training.model_id]
    assert page.cursor.total_count >= 2
    following = rest.list_training_runs(limit=1, offset=1).result()
    assert following.training_runs[0].training_run_id == training.model_id
    run = rest.get_training_run(training.model_id).result()
    assert (run.base_model, run.lora_rank, run.is_lora, run.user_metadata) == (NAME, 4, True, {"purpose": "test"})


def test_checkpoints_are_listed_published_expired_and_deleted(rest, training):
    path = training.save_state("one", ttl_seconds=7200, user_metadata={"k": "v"}).result().path
    named = training.save_weights_for_sampler("one").result().path
    listed = rest.list_checkpoints(training.model_id).result().checkpoints
    assert {(item.tinker_path, item.checkpoint_type) for item in listed} == {(path, "training"), (named, "sampler")}
    first = next(item for item in listed if item.tinker_path == path)
    assert first.user_metadata == {"k": "v"} and first.size_bytes > 1000
    assert 7100 < (first.expires_at - first.time).total_seconds() < 7300
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
    rest.publish_checkpoint_from_tinker_path(path).result()
    changed = next(item for item in rest.list_user_checkpoints().result().checkpoints if item.tinker_path == path)
    assert changed.expires_at is None and changed.public
    rest.unpublish_checkpoint_from_tinker_path(path).result()
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert [item.tinker_path for item in rest.list_checkpoints(training.model_id).result().checkpoints] == [named]
    with pytest.raises(tinker.NotFoundError, match="was never saved, was deleted, or has expired"):
        rest.get_weights_info_by_tinker_path(path).result()


def test_weights_info_says_how_to_make_the_same_adapter(rest, training):
    info = rest.get_weights_info_by_tinker_path(training.save_state("info").result().path).result()
    assert (info.base_model, info.is_lora, info.lora_rank, info.train_mlp) == (NAME, True, 4, True)


def test_sessions_and_samplers_are_described(rest, service, training):
    sampler = service.create_sampling_client(base_model=NAME).result()
    session_id = service.holder.get_session_id()
    session = rest.get_session(session_id).result()
    assert training.model_id in session.training_run_ids
    assert session.sampler_ids == [sampler._sampling_session_id]
    assert session_id in rest.list_sessions().result().sessions
    described = rest.get_sampler(sampler._sampling_session_id).result()
    assert (described.base_model, described.model_path) == (NAME, None)


@pytest.mark.filterwarnings("ignore")
def test_sessions_can_be_searched(url, rest):
    made = []
    for name in ("nightly alpha", "nightly beta", "other"):
        service = tinker.ServiceClient(base_url=url, api_key=KEY, display_name=name, user_metadata={"name": name})
        made.append(service.holder.get_session_id())
        if name == "nightly alpha":
            service.close("errored", detail="it broke").result(timeout=30)
    page = rest.search_sessions(types.SessionSearchRequest(display_name="NIGHTLY", limit=1)).result()
    assert [item.session_id for item in page.sessions] == [made[1]]
    page = rest.search_sessions(types.SessionSearchRequest(display_name="NIGHTLY", limit=1, cursor=page.next_cursor)).result()
    assert [item.session_id for item in page.sessions] == [made[0]]
    assert page.next_cursor is None
    assert page.sessions[0].status.reason.type == "errored"
    found = rest.search_sessions(types.SessionSearchRequest(user_metadata={"name": "other"})).result().sessions
    assert [item.session_id for item in found] == [made[2]]


def test_a_finished_session_is_over(url):
    service = tinker.ServiceClient(base_url=url, api_key=KEY)
    training = service.create_lora_training_client(NAME, rank=2).result()
    session_id = service.holder.get_session_id()
    service.close("success").result(timeout=30)
    wire = httpx.Client(base_url=f"{url}/api/v1")
    assert wire.post("/session_heartbeat", json={"session_id": session_id}).status_code == 410
    assert wire.post("/session_heartbeat", json={"session_id": "unknown"}).status_code == 404
    assert wire.post("/get_info", json={"model_id": training.model_id}).status_code == 404


def test_an_unloaded_model_is_out_of_memory_and_still_listed(url, rest, engine):
    wire = Wire(url)
    model, other = wire.model(), wire.model()
    waiting = wire.train(model, 2, [wire_datum(4)])
    assert wire.result(wire.ok("unload_model", model_id=model)) == {"model_id": model, "type": "unload_model"}
    assert "was unloaded before this request ran" in wire.failure(waiting)
    with pytest.raises(NotFound):
        engine.resident(model)
    assert "is no longer in memory" in wire.refused("optim_step", 404, model_id=model, seq_id=3, adam_params={})
    assert rest.get_training_run(model).result().training_run_id == model
    assert wire.result(wire.train(other, 1, [wire_datum(4)])).loss > 0


def test_small_endpoints_that_every_client_asks(url):
    wire = httpx.Client(base_url=f"{url}/api/v1")
    assert wire.get("/healthz").json() == {"status": "ok"}
    names = [model["model_name"] for model in wire.get("/get_server_capabilities").json()["supported_models"]]
    assert NAME in names and "spindle/alias" in names
    told = wire.post("/client/dynamic_config", json={"sdk_version": "0.38.0"}).json()
    assert told["sample_cancel_enabled"] is True and told["refresh_interval_sec"] > 0
    assert wire.post("/telemetry", json={"events": [{"event": "SESSION_START"}]}).json() == {"status": "accepted"}


def test_an_archive_holds_the_files_of_the_checkpoint(url, training, engine):
    training.save_state("packed").result()
    wire = httpx.Client(base_url=url, follow_redirects=True)
    where = f"/api/v1/training_runs/{training.model_id}/checkpoints/weights/packed/archive"
    redirect = wire.get(where, follow_redirects=False)
    assert redirect.status_code == 302 and redirect.headers["expires"].endswith("GMT")
    with tarfile.open(fileobj=io.BytesIO(wire.get(where).content)) as archive:
        names = archive.getnames()
        assert names == ["adapter_config.json", "adapter_model.safetensors", "optimizer.safetensors", "spindle.json"]
        data = archive.extractfile("adapter_model.safetensors").read()
    from safetensors.torch import load

    params = engine.resident(training.model_id).adapter
    slot = params.layout.slots[0]
    assert torch.equal(load(data)[slot.name].flatten(), params.params[slot.offset : slot.offset + slot.numel])
    broken = redirect.headers["location"].replace("/files/", "/files/x")
    assert wire.get(broken).status_code == 404


def test_external_weights_are_saved_and_downloaded_by_signed_links(rest, training):
    path = training.save_weights_external("export").result().path
    links = rest.get_external_weights_urls(path).result()
    assert set(links.urls) == {"adapter_config.json", "adapter_model.safetensors", "spindle.json"}
    assert httpx.get(links.urls["adapter_config.json"]).json()["r"] == 4
    with pytest.raises(tinker.RequestFailedError, match=r"this server cannot encrypt|is neither an age1"):
        training.save_weights_external("secret", age_encryption_recipients=["age1nonsense"]).result()


def test_a_merged_export_is_a_model_that_transformers_loads(url, rest, training, engine, tmp_path):
    data = [datum(12)]
    for _ in range(3):
        training.forward_backward(data, "cross_entropy")
        training.optim_step(adam(1e-2)).result()
    expected = training.forward(data, "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
    seq_id = training._get_request_id()
    body = {"model_id": training.model_id, "seq_id": seq_id + 1, "path": "whole", "format": "merged"}
    wire = Wire(url, session=False)
    saved = wire.result(wire.ok("save_weights_external", **body))
    links = rest.get_external_weights_urls(saved["path"]).result()
    assert set(links.urls) == {"config.json", "generation_config.json", "model.safetensors"}
    for name, link in links.urls.items():
        (tmp_path / name).write_bytes(httpx.get(link).content)
    assert saved["size_bytes"] == sum(path.stat().st_size for path in tmp_path.iterdir())
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    tokens = torch.tensor(data[0].model_input.to_ints())
    targets = torch.tensor(data[0].loss_fn_inputs["target_tokens"].to_numpy())
    with torch.no_grad():
        logprobs = torch.log_softmax(model(tokens[None]).logits[0], -1).gather(1, targets[:, None])[:, 0]
    assert (logprobs - torch.from_numpy(expected)).abs().max() <= 1e-4
    assert wire.ok("weights_info", tinker_path=saved["path"])["is_lora"] is False
    again = {"model_id": training.model_id, "seq_id": seq_id + 2, "path": "x", "format": "gguf"}
    assert "format is 'gguf', allowed: adapter, merged" in wire.failure(wire.ok("save_weights_external", **again))


def test_the_operator_may_choose_merged_exports(engine, tmp_path):
    with running(engine, store=tmp_path, name=NAME, settings=ServerSettings(external_format="merged")) as url:
        service = tinker.ServiceClient(base_url=url, api_key=KEY)
        training = service.create_lora_training_client(NAME, rank=2).result()
        path = training.save_weights_external("whole").result().path
        names = set(RestClient(base_url=url, api_key=KEY).get_external_weights_urls(path).result().urls)
        assert names == {"config.json", "generation_config.json", "model.safetensors"}
        service.close("success").result(timeout=30)
    with pytest.raises(ValueError, match="external_format is 'gguf', allowed: adapter, merged"):
        ServerSettings(external_format="gguf")


def test_copied_weights_are_the_callers_own(rest, service, training):
    training.forward_backward([datum(6)], "cross_entropy")
    training.optim_step(adam()).result()
    path = training.save_state("original").result().path
    copied = rest.copy_weights(path, "any-project").result()
    assert copied != path and copied.endswith("/weights/original")
    rest.delete_checkpoint_from_tinker_path(path).result()
    client = service.create_training_client_from_state_with_optimizer(copied).result()
    expected = training.forward([datum(6)], "cross_entropy").result().metrics
    assert client.forward([datum(6)], "cross_entropy").result().metrics == expected


def test_custom_losses_take_numbers_and_tables(service, training):
    def scaled(logprobs, scale, table):
        loss = scale * (logprobs * table.sum(-1)).sum()
        return loss, {"custom/scale:mean": scale}

    handle = service.create_custom_loss(scaled, {"logprobs": 1, "scale": 0, "table": 2}).result()
    data = []
    for seed, n in enumerate((6, 1, 4)):
        extra = {"scale": np.array(0.5 + seed, np.float32), "table": np.full((n, 3), 1.0 + seed, np.float32)}
        data.append(datum(n, seed, **{name: tinker.TensorData.from_numpy(value) for name, value in extra.items()}))
    output = training.forward_backward_custom(data, handle).result()
    logprobs = [item["logprobs"].to_torch() for item in output.loss_fn_outputs]
    expected = sum((0.5 + seed) * 3 * (1.0 + seed) * float(p.sum()) for seed, p in enumerate(logprobs))
    assert output.metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)
    assert output.metrics["custom/scale:mean"] == pytest.approx(1.5)


def test_custom_losses_run_on_the_server(service, training):
    def squared(logprobs, weights):
        loss = (weights * logprobs**2).sum()
        return loss, {"custom/squared:sum": loss}

    handle = service.create_custom_loss(squared, {"logprobs": 1, "weights": 1}).result()
    assert handle.loss_id
    data = [datum(6), datum(4, 1)]
    output = training.forward_backward_custom(data, handle).result()
    logprobs = [item["logprobs"].to_torch() for item in training.forward(data, "cross_entropy").result().loss_fn_outputs]
    expected = float(sum((item**2).sum() for item in logprobs))
    assert output.metrics["custom/squared:sum"] == pytest.approx(expected, rel=1e-5)
    on_server = training.optim_step(adam(0)).result().metrics["grad_norm"]
    training.forward_backward_custom(data, lambda data, logprobs: (sum((item**2).sum() for item in logprobs), {})).result()
    assert training.optim_step(adam(0)).result().metrics["grad_norm"] == pytest.approx(on_server, rel=1e-4)


def test_completions_can_be_polled_for_a_whole_sampling_session(url, engine, monkeypatch):
    from tinker.lib.internal_client_holder import InternalClientHolder

    fetch = InternalClientHolder._fetch_client_config

    async def with_poller(self, auth):
        return (await fetch(self, auth)).model_copy(update={"sample_use_retrieve_futures": True})

    monkeypatch.setattr(InternalClientHolder, "_fetch_client_config", with_poller)
    service = tinker.ServiceClient(base_url=url, api_key=KEY)
    sampler = service.create_sampling_client(base_model=NAME).result()
    params = types.SamplingParams(max_tokens=3, seed=1)
    futures = [sampler.sample(types.ModelInput.from_ints([5, 6, index]), 2, params) for index in range(20)]
    assert [len(future.result(timeout=60).sequences) for future in futures] == [2] * 20
    service.close("success").result(timeout=30)


def _sample_elsewhere(pickled: bytes, queue) -> None:
    sampler = pickle.loads(pickled)
    queue.put(
        sampler.sample(types.ModelInput.from_ints([5, 6]), 1, types.SamplingParams(max_tokens=3, temperature=0))
        .result()
        .sequences[0]
        .tokens
    )


@pytest.mark.slow
def test_a_pickled_sampler_works_in_another_process(service):
    sampler = service.create_sampling_client(base_model=NAME).result()
    expected = sampler.sample(types.ModelInput.from_ints([5, 6]), 1, types.SamplingParams(max_tokens=3, temperature=0)).result()
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_sample_elsewhere, args=(pickle.dumps(sampler), queue))
    process.start()
    assert list(queue.get(timeout=90)) == list(expected.sequences[0].tokens)
    process.join()


def test_abandoned_sampling_is_cancelled(url, service):
    sampler = service.create_sampling_client(base_model=NAME).result()
    future = sampler.sample(types.ModelInput.from_ints([5, 6]), 1, types.SamplingParams(max_tokens=400, stop=[]))
    future.future().cancel() if hasattr(future, "future") else future.cancel()
    after = sampler.sample(types.ModelInput.from_ints([5, 6]), 1, types.SamplingParams(max_tokens=2, stop=[]))
    assert len(after.result(timeout=60).sequences[0].tokens) == 2


@pytest.mark.parametrize("path", ["/billing/usage/events", "/audit", "/nothing"])
def test_what_is_not_here_says_so(url, path):
    response = httpx.get(f"{url}/api/v1{path}")
    assert response.status_code == 404
    assert "it has no billing, audit or projects" in response.json()["error"]


@pytest.fixture
def run_tinker(url, monkeypatch):
    """The ``tinker`` command, run in this process: its output."""
    from click.testing import CliRunner
    from tinker.cli.__main__ import main_cli

    monkeypatch.setenv("TINKER_BASE_URL", url)
    monkeypatch.setenv("TINKER_API_KEY", KEY)

    def run(*words: str) -> str:
        done = CliRunner().invoke(main_cli, words)
        assert done.exit_code == 0, (done.output, done.exception)
        return done.output

    return run


def test_the_tinker_command_line(run_tinker, training, tmp_path):
    path = training.save_state("shown").result().path
    run, first = training.model_id, ("--format", "json")
    assert NAME in run_tinker(*first, "model", "list")
    assert run in run_tinker(*first, "run", "list")
    assert '"lora_rank": 4' in run_tinker(*first, "run", "info", run)
    assert path in run_tinker(*first, "checkpoint", "list", "--run-id", run)
    assert path in run_tinker(*first, "checkpoint", "info", path)
    run_tinker("checkpoint", "publish", path)
    run_tinker("checkpoint", "unpublish", path)
    run_tinker("checkpoint", "set-ttl", path, "--ttl", "7200")
    run_tinker("checkpoint", "download", path, "--output", str(tmp_path))
    assert list(tmp_path.rglob("adapter_model.safetensors"))
    run_tinker("checkpoint", "delete", path, "--yes")
    assert path not in run_tinker(*first, "checkpoint", "list", "--run-id", run)


def test_external_weights_can_be_encrypted(rest, training):
    pyrage = pytest.importorskip("pyrage")
    identity = pyrage.x25519.Identity.generate()
    path = training.save_weights_external("sealed", age_encryption_recipients=[str(identity.to_public())]).result().path
    links = rest.get_external_weights_urls(path).result()
    assert set(links.urls) == {"adapter_config.json.age", "adapter_model.safetensors.age", "spindle.json.age"}
    config = pyrage.decrypt(httpx.get(links.urls["adapter_config.json.age"]).content, [identity])
    assert json.loads(config)["r"] == 4


def test_a_process_that_only_serves_keeps_what_it_starts_with_from_the_collector(monkeypatch, engine, tmp_path):
    """Else a full collection stops every thread to look at all of torch."""
    frozen = []

    class Stub:
        def run(self):
            frozen.append(gc.get_freeze_count())

    room = importlib.import_module("spindle.server.serve")
    monkeypatch.setattr(room, "_uvicorn", lambda *_: Stub())
    try:
        room.serve(engine, store=tmp_path)
        assert frozen[0] > 100_000 and len(gc.get_objects()) < 10_000
    finally:
        gc.unfreeze()


def test_middleware_that_an_embedding_application_adds_sees_every_request(engine, tmp_path):
    class Deny:
        def __init__(self, app):
            self.app = app

        async def __call__(self, scope, receive, send):
            if scope["type"] != "http":
                return await self.app(scope, receive, send)
            await Response("no", 403)(scope, receive, send)

    app = create_app(engine, tmp_path)
    app.add_middleware(Deny)

    async def asked():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
            return [(await client.get(path)).status_code for path in ("/api/v1/healthz", "/api/v1/sessions/x", "/nothing")]

    assert asyncio.run(asked()) == [403, 403, 403]
