"""What must survive a restart of the server, and what it says of what did not."""

from __future__ import annotations

import sqlite3
import time

import numpy as np
import pytest

from spindle.server import ServerSettings, create_app, running
from tests.server.wire import NAME, Wire, datum


@pytest.fixture
def store(tmp_path):
    return tmp_path / "store"


def test_runs_checkpoints_and_samplers_are_there_again(engine, store):
    with running(engine, store=store, name=NAME) as url:
        wire = Wire(url)
        session, model = wire.session_id, wire.model()
        wire.train(model, 1, [datum(8)])
        wire.step(model, 2, learning_rate=0.01)
        path = wire.result(wire.ok("save_weights", model_id=model, seq_id=3, path="a", user_metadata={"k": "v"}))["path"]
        named = wire.result(wire.ok("save_weights_for_sampler", model_id=model, seq_id=4, path="b"))["path"]
        sampler = wire.ok("create_sampling_session", session_id=session, sampling_session_seq_id=0, model_path=named)["sampling_session_id"]
        unnamed = wire.result(wire.ok("save_weights_for_sampler", model_id=model, seq_id=5, sampling_session_seq_id=1))[
            "sampling_session_id"
        ]
        score = {"prompt_logprobs": True, "sampling_params": {"max_tokens": 1, "temperature": 0.0}, "base_model": None}
        before = wire.sampled(wire.sample([5, 6, 7], sampling_session_id=sampler, seq_id=0, **score)).prompt_logprobs
        expected = wire.result(wire.train(model, 6, [datum(8)], forward_only=True)).loss
    with running(engine, store=store, name=NAME) as url:
        wire = Wire(url)
        runs = wire.get("/training_runs").json()
        assert [run["training_run_id"] for run in runs["training_runs"]] == [model]
        assert runs["training_runs"][0]["last_checkpoint"]["tinker_path"] == path
        assert runs["training_runs"][0]["last_sampler_checkpoint"]["tinker_path"] == named
        listed = wire.get("/checkpoints").json()["checkpoints"]
        assert {item["tinker_path"]: item["user_metadata"] for item in listed} == {path: {"k": "v"}, named: None}
        ack = wire.ok("load_weights", session_id=wire.session_id, model_seq_id=0, path=path, optimizer=True)
        assert wire.result(ack)["model_id"] == f"{wire.session_id}:train:0"
        again = wire.result(wire.train(f"{wire.session_id}:train:0", 1, [datum(8)], forward_only=True)).loss
        assert again == expected
        wire.ok("session_heartbeat", session_id=session)
        after = wire.sampled(wire.sample([5, 6, 7], sampling_session_id=sampler, seq_id=1, **score)).prompt_logprobs
        assert after == before
        refused = wire.refused("optim_step", 404, model_id=model, seq_id=7, adam_params={})
        assert "is no longer in memory" in refused and "create a training client from its last checkpoint" in refused
        lost = {"prompt": {"chunks": [{"tokens": [5]}]}, "sampling_params": {}, "sampling_session_id": unnamed, "seq_id": 0}
        assert "on weights without a name, which a restart drops" in wire.refused("asample", 404, **lost)


def test_a_store_in_use_is_refused(engine, store):
    app = create_app(engine, store)
    with pytest.raises(Exception, match="is in use by another server"):
        create_app(engine, store)
    app.state.server.catalogue.close()


def test_a_session_without_heartbeats_expires_and_frees_its_adapters(engine, store):
    settings = ServerSettings(session_timeout_s=0.5)
    with running(engine, store=store, name=NAME, settings=settings) as url:
        wire = Wire(url)
        model = wire.model()
        server_wire = Wire(url)
        deadline = time.monotonic() + 20
        while wire.get("/metrics", headers={}).status_code and time.monotonic() < deadline:
            try:
                engine.resident(model)
            except Exception:
                break
            time.sleep(0.1)
        response = server_wire.post("/session_heartbeat", json={"session_id": wire.session_id})
        assert response.status_code == 410
        assert "is over (expired)" in response.json()["error"]
        assert "is no longer in memory" in server_wire.refused("optim_step", 404, model_id=model, seq_id=1, adam_params={})


def test_heartbeats_keep_a_session_alive(engine, store):
    settings = ServerSettings(session_timeout_s=0.6)
    with running(engine, store=store, name=NAME, settings=settings) as url:
        wire = Wire(url)
        model = wire.model()
        for _ in range(5):
            time.sleep(0.3)
            wire.ok("session_heartbeat", session_id=wire.session_id)
        assert wire.result(wire.train(model, 1, [datum(4)])).loss > 0


def test_published_weights_are_dropped_oldest_first_when_there_are_too_many(engine, store):
    settings = ServerSettings(max_snapshot_bytes=1)
    with running(engine, store=store, name=NAME, settings=settings) as url:
        wire = Wire(url)
        model = wire.model()
        samplers = [
            wire.result(wire.ok("save_weights_for_sampler", model_id=model, seq_id=seq_id, sampling_session_seq_id=seq_id))[
                "sampling_session_id"
            ]
            for seq_id in (1, 2)
        ]
        body = {"prompt": {"chunks": [{"tokens": [5]}]}, "sampling_params": {"max_tokens": 1}, "seq_id": 0}
        refused = wire.refused("asample", 404, **body, sampling_session_id=samplers[0])
        assert "are no longer held: too many were published after them; save weights under a name to keep them" in refused
        assert len(wire.sampled(wire.ok("asample", **body, sampling_session_id=samplers[1])).sequences) == 1


def test_answers_are_kept_within_bounds_and_then_gone(engine, store):
    settings = ServerSettings(max_kept_futures=3)
    with running(engine, store=store, name=NAME, settings=settings) as url:
        wire = Wire(url)
        model = wire.model()
        acks = [wire.train(model, seq_id, [datum(3)]) for seq_id in range(1, 6)]
        wire.result(acks[-1])
        response = wire.post("/retrieve_future", json={"request_id": acks[0]["request_id"]})
        assert response.status_code == 410
        assert "is no longer kept; send the request again" in response.json()["error"]
        assert wire.post("/retrieve_future", json={"request_id": "nobody"}).status_code == 404


def test_large_answers_are_announced_by_size_when_the_client_allows_it(engine, store):
    with running(engine, store=store, name=NAME, settings=ServerSettings(inline_payload_bytes=100)) as url:
        wire = Wire(url)
        ack = wire.train(wire.model(), 1, [datum(100)])
        request = {"request_id": ack["request_id"], "allow_metadata_only": True}
        announced = wire.post("/retrieve_future", json=request, headers={"Accept": "application/x-protobuf"}).json()
        proto = wire.raw(ack["request_id"]).content
        assert announced == {"status": "complete_metadata", "response_payload_size": len(proto)}


def test_a_pending_future_says_try_again(engine, store):
    with running(engine, store=store, name=NAME, settings=ServerSettings(long_poll_s=0.2)) as url:
        wire = Wire(url)
        model = wire.model()
        ack = wire.train(model, 2, [datum(3)])
        answer = wire.post("/retrieve_future", json={"request_id": ack["request_id"]}).json()
        assert answer == {"type": "try_again", "request_id": ack["request_id"], "queue_state": "active"}
        wire.train(model, 1, [datum(3)])
        assert np.isfinite(wire.result(ack).loss)


def test_an_expired_checkpoint_is_deleted_by_a_timer(engine, store):
    with running(engine, store=store, name=NAME) as url:
        wire = Wire(url)
        model = wire.model()
        path = wire.result(wire.ok("save_weights", model_id=model, seq_id=1, path="short", ttl_seconds=3600))["path"]
        with sqlite3.connect(store / "catalogue.sqlite") as other:  # an hour passes
            other.execute("UPDATE checkpoints SET expires_at = ?", (time.time() + 1,))
        wire.ok("weights_info", tinker_path=path)
        assert wire.put(f"/training_runs/{model}/checkpoints/weights/short/ttl", json={"ttl_seconds": 12}).status_code == 400
        wire.result(wire.ok("save_weights", model_id=model, seq_id=2, path="other", ttl_seconds=3600))  # the timer looks at what is next
        deadline = time.monotonic() + 20
        while list(store.glob("runs/*/weights/short-*")) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not list(store.glob("runs/*/weights/short-*"))
        assert "has expired" in wire.refused("weights_info", 404, tinker_path=path)
