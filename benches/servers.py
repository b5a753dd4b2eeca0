"""The two servers of ``test_request_path.py``, each in a process of its own: ``python servers.py spindle|stub PORT STORE``."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAME = "bench/tiny"
KEY = "tml-bench-key"
VOCAB = 2048
CONTEXT = 4096


def tiny_model():
    """One layer of width 32: compute stays small beside the path."""
    from tests.tiny import tiny_llama

    width = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    return tiny_llama(vocab_size=VOCAB, num_hidden_layers=1, max_position_embeddings=CONTEXT, **width)


def serve_spindle(port: int, store: str) -> None:
    from spindle.compute.model import BaseModel
    from spindle.engine import Engine
    from spindle.server import serve

    with Engine(BaseModel.load(tiny_model()), devices=["cpu"], name=NAME) as engine:
        serve(engine, port=port, store=store, api_keys=[KEY], log_level="warning")


def canned_answer(lengths: list[int], width: int) -> bytes:
    import numpy as np

    from spindle import codec

    cells = np.full(sum(lengths) * width, -1.0, np.float32)
    return codec.encode_forward_backward(cells, np.array(lengths), np.full(len(lengths), width), {"loss:sum": float(len(lengths))})


def serve_stub(port: int, answer_path: str) -> None:
    """A server that does nothing: it reads each body, and answers with bytes made before it started, at once."""
    import uvicorn

    from spindle.server.client import client_config
    from spindle.server.settings import ServerSettings

    answer = Path(answer_path).read_bytes()
    model = {"model_id": "stub:train:0", "type": "create_model"}
    info = {"type": "get_info", "model_data": {"arch": "llama", "model_name": NAME, "tokenizer_id": NAME}, "model_id": "stub:train:0"}
    fixed = {
        "client/config": client_config(ServerSettings(), "127.0.0.1"),
        "client/dynamic_config": {"refresh_interval_sec": 300},
        "create_session": {"type": "create_session", "session_id": "stub"},
        "session_heartbeat": {"type": "session_heartbeat"},
        "create_model": {"request_id": "create_model", "model_id": "stub:train:0"},
        "get_info": info | {"is_lora": True, "lora_rank": 32, "model_name": NAME},
        "forward_backward": {"request_id": "forward_backward", "model_id": "stub:train:0"},
        "optim_step": {"request_id": "optim_step", "model_id": "stub:train:0"},
    }
    retrieved = {"create_model": model, "optim_step": {"type": "optim_step", "metrics": {}}}

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body = b""
        while (message := await receive()).get("more_body") or message.get("body"):
            body = message["body"] if not body else b"..."  # only a short body, in one piece, is ever looked at
            if not message.get("more_body"):
                break
        noun = scope["path"].removeprefix("/api/v1/")
        kind, payload = b"application/json", b"{}"
        if noun == "retrieve_future":
            request = json.loads(body)["request_id"]
            if request == "forward_backward":
                kind, payload = b"application/x-protobuf", answer
            else:
                payload = json.dumps(retrieved[request]).encode()
        elif noun in fixed:
            payload = json.dumps(fixed[noun]).encode()
        headers = [(b"content-type", kind), (b"content-length", str(len(payload)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": payload})

    uvicorn.run(app, port=port, loop="uvloop", http="httptools", ws="none", lifespan="off", log_level="warning", access_log=False)


@contextlib.contextmanager
def started(kind: str, argument: str) -> Iterator[str]:
    """The server ``kind`` in another process; yields its URL once it answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen([sys.executable, __file__, kind, str(port), argument], env=os.environ | {"PYTHONPATH": path})
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(1200):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/api/v1/healthz", timeout=5):
                break
            assert process.poll() is None, f"the {kind} server stopped with status {process.returncode}"
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def engine_stats(url: str) -> dict[str, Any]:
    request = urllib.request.Request(f"{url}/metrics", headers={"X-API-Key": KEY})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)["engine"]


if __name__ == "__main__":
    {"spindle": serve_spindle, "stub": serve_stub}[sys.argv[1]](int(sys.argv[2]), sys.argv[3])
