"""What the engine and the server count: JSON, or Prometheus' text format for who accepts text. Seconds and bytes are said in the names."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from spindle.server.live_view import resident_bytes
from spindle.server.routing import Call, Routes

routes = Routes()


@routes.get("/metrics", prefix="")
async def metrics(call: Call) -> Any:
    counted = {
        "engine": dict(call.server.engine.stats()),
        "server": dict(call.server.stats()) | {"resident_memory_bytes": resident_bytes()},
    }
    accepted = call.request.headers.get("accept", "")
    if "text/plain" not in accepted and "openmetrics" not in accepted:
        return counted
    lines = [f"spindle_{name} {value}" for name, value in numbers(counted)]
    return Response("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")


def numbers(value: Any, name: str = "") -> list[tuple[str, float]]:
    """Every number of a nested dict under its path, those of a list labelled by their index."""
    if isinstance(value, dict):
        return [item for key, inner in value.items() for item in numbers(inner, f"{name}_{key}".strip("_"))]
    if isinstance(value, list | tuple):
        return [(f'{name}{{index="{index}"}}', float(item)) for index, item in enumerate(value) if isinstance(item, int | float)]
    return [(name, float(value))] if isinstance(value, int | float) else []
