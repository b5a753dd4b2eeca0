"""A trainer in this process: what is saved is committed before the client hears of it, and a frontend's routes are everyone's."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

import numpy as np
import pytest

from spindle.compute.model import BaseModel
from spindle.engine import Engine
from spindle.errors import MalformedBody, ServerError
from spindle.modal.trainer import Trainer, compressed
from spindle.modal.wire import WireRequest, decode_request, encode, identify, route_of
from tests.tiny import tiny_llama

KEY = b"tml-trainer-key"
JSON = [(b"x-api-key", KEY), (b"content-type", b"application/json")]


def request(route: str, **body) -> WireRequest:
    return WireRequest("POST", f"/api/v1/{route}", b"", JSON, json.dumps(body).encode())


async def ask(trainer: Trainer, route: str, **body) -> dict:
    response = await trainer.call(request(route, **body))
    assert response.status == 200, response.body
    return json.loads(response.body)


async def finished(trainer: Trainer, ack: dict) -> dict:
    while True:
        answer = await ask(trainer, "retrieve_future", request_id=ack["request_id"])
        if answer.get("type") != "try_again":
            return answer


def test_a_checkpoint_is_committed_before_its_client_hears_of_it(tmp_path):
    commits: list[set[str]] = []

    def commit() -> None:
        commits.append({path.name for path in tmp_path.rglob("adapter_config.json")})

    async def scenario() -> None:
        trainer = Trainer(lambda: Engine(BaseModel.load(tiny_llama()), name="m"), tmp_path, [KEY.decode()], commit)
        await trainer.start()
        assert set(trainer.cold_start) == {"engine_s", "server_s"} and all(seconds >= 0 for seconds in trainer.cold_start.values())
        session = (await ask(trainer, "create_session", tags=[], sdk_version="0"))["session_id"]
        made = await finished(trainer, await ask(trainer, "create_model", session_id=session, model_seq_id=0, base_model="m"))
        assert commits == []
        save = await ask(trainer, "save_weights", model_id=made["model_id"], path="one", seq_id=1)
        saved = await finished(trainer, save)
        assert commits == [{"adapter_config.json"}] and saved["path"] == f"tinker://{made['model_id']}/weights/one"
        await finished(trainer, save)  # asked again: the volume has it already
        await finished(trainer, await ask(trainer, "optim_step", model_id=made["model_id"], seq_id=2, adam_params={}))
        assert len(commits) == 1
        await trainer.stop()
        assert len(commits) == 2

    asyncio.run(scenario())


def test_a_trainer_that_goes_leaves_no_poll_hanging(tmp_path):
    """What waits behind a gap in the order cannot run any more: its client hears so before the container is gone."""

    async def scenario() -> None:
        trainer = Trainer(lambda: Engine(BaseModel.load(tiny_llama()), name="m"), tmp_path, [KEY.decode()])
        await trainer.start()
        session = (await ask(trainer, "create_session", tags=[], sdk_version="0"))["session_id"]
        made = await finished(trainer, await ask(trainer, "create_model", session_id=session, model_seq_id=0, base_model="m"))
        waits = await ask(trainer, "optim_step", model_id=made["model_id"], seq_id=2, adam_params={})
        poll = asyncio.ensure_future(ask(trainer, "retrieve_future", request_id=waits["request_id"]))
        await asyncio.sleep(0.05)
        assert not poll.done()
        await trainer.stop()
        answer = await asyncio.wait_for(poll, 10)
        assert "was unloaded before this request ran" in answer["error"]

    asyncio.run(scenario())


def test_without_keys_a_trainer_does_not_start(tmp_path):
    with pytest.raises(ServerError, match=r"^no API keys: one of the recipe's auth.secrets must set SPINDLE_API_KEYS"):
        Trainer(lambda: pytest.fail("no engine is made"), tmp_path, [])


def test_clients_are_told_to_compress(tmp_path):
    async def scenario() -> None:
        trainer = Trainer(lambda: Engine(BaseModel.load(tiny_llama()), name="m"), tmp_path, [KEY.decode()])
        await trainer.start()
        assert (await ask(trainer, "client/config", sdk_version="0.38.0"))["proto_compress_fwdbwd"] is True
        await trainer.stop()

    asyncio.run(scenario())


def test_only_what_shrinks_is_compressed():
    noise = np.random.default_rng(0).bytes(100_000)
    assert compressed(noise) is None
    zeros = compressed(bytes(100_000))
    assert zeros is not None and len(zeros) < 1000


def test_a_request_survives_its_hop():
    sent = WireRequest("POST", "/api/v1/x", b"a=1", [(b"accept", b"*/*")], bytes(range(256)))
    frame = encode(sent)
    assert decode_request(frame) == sent and len(frame) < len(sent.body) + 100


@pytest.mark.parametrize(
    ("body", "subject"),
    [
        (b'{"request_id":"s:train:0:4","model_id":"x"}', "s:train:0:4"),
        (b'{"model_id":"s:train:0","seq_id":1}', "s:train:0"),
        (b'{"sampling_session_id":"s:sample:0"}', "s:sample:0"),
        (b'{"session_id":"s"}', "s"),
        (b'{"other":1}', None),
        (b"not json", None),
        (b"", None),
    ],
)
def test_what_a_json_request_is_about(body, subject):
    assert identify("POST", JSON, body) == subject


def test_what_a_training_body_is_about():
    from spindle import Datum, codec

    data = [Datum([1, 2], {"target_tokens": [2, 3]})]
    kinds = [(b"content-type", b"application/x-protobuf"), (b"content-encoding", b"zstd")]
    assert identify("POST", kinds, codec.encode_request("s:train:0", 3, data, "cross_entropy", zstd=True)) == "s:train:0"
    with pytest.raises(MalformedBody):
        identify("POST", kinds, b"junk")


def test_every_frontend_computes_the_same_route():
    assert {route_of(b"tml-%d" % n, 1) for n in range(50)} == {0}
    counts = Counter(route_of(b"tml-%d" % n, 4) for n in range(4000))
    assert set(counts) == {0, 1, 2, 3} and min(counts.values()) > 850
    assert route_of(b"tml-a", 4) == 2  # for good: a release that routed otherwise would part keys from their checkpoints
