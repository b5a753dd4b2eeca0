"""What the server is doing now: the page at ``/`` and its data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from starlette.responses import HTMLResponse, Response

from spindle.server.routing import Call, Routes
from spindle.server.runs import checkpoint_json

routes = Routes()

SHOWN_CHECKPOINTS = 20
PAGE = (Path(__file__).parent / "page.html").read_text()
POLICY = "default-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'"


@routes.get("/", public=True, prefix="")
async def page(call: Call) -> Response:
    return HTMLResponse(PAGE, headers={"Content-Security-Policy": POLICY})


@routes.get("/live")
async def live(call: Call) -> Any:
    """The caller's runs and checkpoints, and the whole engine's load."""
    server = call.server
    rows, total = server.catalogue.checkpoints(call.owner, SHOWN_CHECKPOINTS, 0)
    models = [model for model in server.models.values() if model.owner == call.owner]
    engine = dict(server.engine.stats())
    clients = {name: one for name, one in engine["queue"]["clients"].items() if name == call.owner}
    return {
        "name": server.name,
        "engine": engine | {"queue": engine["queue"] | {"clients": clients}},
        "server": server.stats(),
        "memory_bytes": resident_bytes(),
        "models": [
            {
                "model_id": model.model_id,
                "base_model": model.base_model,
                "rank": model.lora_rank,
                "last_request_at": model.last_request_at,
                "losses": list(model.losses),
            }
            for model in models
        ],
        "checkpoints": [checkpoint_json(row) for row in rows],
        "checkpoints_total": total,
    }


def resident_bytes() -> int:
    """Memory of this process, from /proc; 0 where there is none."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096
    except OSError:
        return 0
