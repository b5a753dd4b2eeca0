"""What the engine and the server count, as one JSON object. Seconds and bytes are said in the names."""

from __future__ import annotations

from typing import Any

from spindle.server.routing import Call, Routes

routes = Routes()


@routes.get("/metrics", prefix="")
async def metrics(call: Call) -> Any:
    return {"engine": call.server.engine.stats(), "server": call.server.stats()}
