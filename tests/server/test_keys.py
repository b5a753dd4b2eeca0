"""API keys: who may come in, and what each sees."""

from __future__ import annotations

import re

import httpx
import pytest
import tinker
from tinker.lib.public_interfaces.custom_loss import encode_graph, trace_loss

from spindle.errors import InvalidRequest
from spindle.server import metrics, running, serve
from spindle.server.keys import Keys
from tests.server.wire import NAME, Wire, datum

KEYS = {"ann": "tml-ann-key", "bob": "tml-bob-key"}


@pytest.fixture(scope="module")
def guarded(engine, tmp_path_factory):
    with running(engine, store=tmp_path_factory.mktemp("store"), name=NAME, api_keys=KEYS) as url:
        yield url


@pytest.fixture
def ann(guarded):
    return Wire(guarded, KEYS["ann"])


@pytest.fixture
def bob(guarded):
    return Wire(guarded, KEYS["bob"])


@pytest.mark.parametrize("key", [None, "", "tml-wrong", "tml-ann-ke", "tml-ann-key2", "Ünïcode"])
def test_other_keys_are_refused(guarded, key):
    wire = Wire(guarded, session=False)
    headers = {} if key is None else {"X-API-Key": key.encode()}
    response = wire.post("/create_session", json={}, headers=headers)
    assert response.status_code == 401
    assert response.json()["error"] == "X-API-Key is missing or not one of this server's keys"
    assert wire.get("/healthz", headers=headers).json() == {"status": "ok"}


def test_the_sdk_comes_in_with_a_key(guarded):
    service = tinker.ServiceClient(base_url=guarded, api_key=KEYS["ann"])
    assert service.create_lora_training_client(NAME, rank=2).result().get_info().lora_rank == 2
    service.close("success").result(timeout=30)


def test_nobody_sees_another_owners_things(ann, bob):
    model = ann.model()
    ack = ann.train(model, 1, [datum(4)])
    path = ann.result(ann.ok("save_weights", model_id=model, seq_id=2, path="x"))["path"]
    sampler = ann.ok("create_sampling_session", session_id=ann.session_id, sampling_session_seq_id=0, base_model=NAME)[
        "sampling_session_id"
    ]
    checkpoint = f"/training_runs/{model}/checkpoints/weights/x"
    assert bob.get("/training_runs").json()["training_runs"] == []
    assert bob.get("/checkpoints").json()["checkpoints"] == []
    assert ann.session_id not in bob.get("/sessions").json()["sessions"]
    for response in (
        bob.get(f"/training_runs/{model}"),
        bob.get(f"/training_runs/{model}/checkpoints"),
        bob.get(f"/sessions/{ann.session_id}"),
        bob.get(f"/samplers/{sampler}"),
        bob.delete(checkpoint),
        bob.post(checkpoint + "/publish"),
        bob.put(checkpoint + "/ttl", json={"ttl_seconds": 3600}),
        bob.get(checkpoint + "/archive"),
        bob.post("/get_info", json={"model_id": model}),
        bob.post("/weights_info", json={"tinker_path": path}),
        bob.post("/session_heartbeat", json={"session_id": ann.session_id}),
        bob.post("/retrieve_future", json={"request_id": ack["request_id"]}),
        bob.post("/cancel_future", json={"request_id": ack["request_id"]}),
        bob.post("/optim_step", json={"model_id": model, "seq_id": 3, "adam_params": {}}),
        bob.post("/load_weights", json={"session_id": bob.session_id, "model_seq_id": 50, "path": path, "optimizer": False}),
        bob.post("/copy_weights", json={"source_path": path}),
        bob.post("/create_sampling_session", json={"session_id": bob.session_id, "sampling_session_seq_id": 1, "model_path": path}),
    ):
        assert response.status_code == 404, (response.request.url, response.text)


def test_a_published_checkpoint_can_be_read_but_not_changed(ann, bob):
    model = ann.model()
    path = ann.result(ann.ok("save_weights", model_id=model, seq_id=1, path="shared"))["path"]
    checkpoint = f"/training_runs/{model}/checkpoints/weights/shared"
    assert ann.post(checkpoint + "/publish").status_code == 200
    assert bob.ok("weights_info", tinker_path=path)["lora_rank"] == 4
    assert bob.result(bob.ok("load_weights", session_id=bob.session_id, model_seq_id=0, path=path, optimizer=False))["path"] == path
    assert bob.delete(checkpoint).status_code == 404
    assert ann.delete(checkpoint + "/publish").status_code == 200
    assert bob.refused("weights_info", 404, tinker_path=path).startswith("no checkpoint")


def test_an_access_token_opens_another_owners_checkpoint(ann, bob):
    model = ann.model()
    path = ann.result(ann.ok("save_weights", model_id=model, seq_id=1, path="lent"))["path"]
    body = {"session_id": bob.session_id, "model_seq_id": 9, "path": path, "optimizer": False}
    assert bob.result(bob.ok("load_weights", **body, weights_access_token=KEYS["ann"]))["path"] == path


def test_without_a_key_only_loopback_may_bind(engine, tmp_path):
    with pytest.raises(InvalidRequest, match="without an API key only this machine may connect: listen on 127"):
        serve(engine, host="0.0.0.0", store=tmp_path)


def test_keys_must_look_like_keys():
    with pytest.raises(InvalidRequest, match='must begin with "tml-"'):
        Keys({"ann": "secret"})
    with pytest.raises(InvalidRequest, match="two API keys have the same owner's name"):
        Keys(["ann=tml-abcd", "ann=tml-efgh"])
    keys = Keys(["ann=tml-abcd", "tml-efgh"])
    assert keys.owner("tml-abcd") == "ann"
    assert keys.owner("tml-efgh").startswith("key-")
    assert keys.owner("tml-none") is None


def test_clients_are_told_what_suits_their_place(guarded):
    url = f"{guarded}/api/v1/client/config"
    near = httpx.post(url, json={"sdk_version": "0.38.0"}).json()
    far = httpx.post(url, json={"sdk_version": "0.38.0"}, headers={"X-Forwarded-For": "203.0.113.9"}).json()
    assert (near["proto_compress_fwdbwd"], far["proto_compress_fwdbwd"]) == (False, True)
    assert near["fwdbwd_max_chunk_bytes_count"] == 60 << 20
    assert far["fwdbwd_max_chunk_len"] == 4096


def test_the_key_says_whose_it_is(ann):
    assert ann.get("/auth/apikey/me").json()["name"] == "ann"
    assert "takes API keys as they are" in ann.refused("auth/token")
    assert ann.delete("/auth/apikey/me").status_code == 400
    assert ann.get("/training_runs", headers={"X-API-Key": "", "Authorization": f"Bearer {KEYS['ann']}"}).status_code == 200


def test_the_live_page_needs_no_key_but_its_data_does(ann, guarded):
    model = ann.model()
    for seq_id in (1, 2):
        ann.result(ann.train(model, seq_id, [datum(4)]))
    page = httpx.get(guarded)
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert "viewport" in page.text and "http" not in page.text.replace("http://www.w3.org/2000/svg", "")
    assert httpx.get(f"{guarded}/api/v1/live").status_code == 401
    live = ann.get("/live").json()
    shown = next(item for item in live["models"] if item["model_id"] == model)
    assert len(shown["losses"]) == 2 and shown["losses"][0] > 0
    assert live["server"]["models"] >= 1 and live["memory_bytes"] > 1_000_000


def test_metrics_are_json_or_prometheus_text(ann, guarded):
    url = f"{guarded}/metrics"
    headers = {"X-API-Key": KEYS["ann"]}
    assert httpx.get(url, headers=headers).json()["engine"]["trained_tokens"] > 0
    text = httpx.get(url, headers=headers | {"Accept": "text/plain"}).text
    figures = dict(line.rsplit(" ", 1) for line in text.splitlines())
    assert float(figures["spindle_engine_trained_tokens"]) > 0
    assert "spindle_server_pending_requests" in figures


def test_clients_names_are_labels_and_never_part_of_a_metrics_name(engine, tmp_path, monkeypatch):
    odd = 'a "b" \\ c{d="e"} 1\nspindle_fake 7\u00e9'
    with running(engine, store=tmp_path, name=NAME, api_keys={odd: "tml-odd-key", "plain": "tml-plain-key"}) as url:
        one, two = Wire(url, "tml-odd-key"), Wire(url, "tml-plain-key")
        models = [one.model(), two.model(), two.model()]
        text = two.get(f"{url}/metrics", headers={"Accept": "text/plain"}).text
        pattern = re.compile(r'(spindle_[a-z0-9_]+)(?:\{([a-z_]+)="((?:[^"\\\n]|\\["\\n])*)"\})? (-?[0-9.e+-]+|nan)')
        lines = [pattern.fullmatch(line) for line in text.removesuffix("\n").split("\n")]
        assert all(lines), text
        clients = {line[3]: float(line[4]) for line in lines if line[1] == "spindle_engine_queue_clients_adapters" and line[2] == "client"}
        escaped = odd.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        assert clients.items() >= {escaped: 1.0, "plain": 2.0}.items()
        assert not any(line[1] == "spindle_fake" for line in lines)
        monkeypatch.setattr(metrics, "MAX_LABELS", 1)
        text = two.get(f"{url}/metrics", headers={"Accept": "text/plain"}).text
        assert text.count("spindle_engine_queue_clients_adapters{") == 1
        assert f"spindle_engine_queue_clients_not_listed {len(clients) - 1:.1f}\n" in text
        assert two.get("/live").json()["engine"]["queue"]["clients"].keys() == {"plain"}  # the page shows nobody else
        for wire, model in zip((one, two, two), models, strict=True):
            wire.ok("unload_model", model_id=model)


def test_nobody_trains_with_another_owners_custom_loss(ann, bob):
    traced = trace_loss(lambda logprobs: (-logprobs.sum(), {}), {"logprobs": 1}, ann.session_id)
    inputs, graph = [one.model_dump() for one in traced.inputs], encode_graph(traced).model_dump()
    ack = ann.ok("create_custom_loss", session_id=ann.session_id, custom_loss_seq_id=0, name="mine", inputs=inputs, graph=graph)
    loss_id = ann.result(ack)["loss_id"]
    config = {"loss_id": loss_id}
    assert ann.result(ann.train(ann.model(), 1, [datum(4)], "custom", loss_fn_config=config)).metrics["loss:sum"] > 0
    model = bob.model()
    failed = bob.failure(bob.train(model, 1, [datum(4)], "custom", loss_fn_config=config))
    assert failed == f"loss_fn_config: loss_id {loss_id!r} is not known; create it with create_custom_loss"
    assert bob.result(bob.train(model, 2, [datum(4)])).metrics["loss:sum"] > 0
