"""What the engine and the server count: JSON, or Prometheus' text format for who accepts text. Seconds and bytes are said in the names."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from starlette.responses import Response

from spindle.server.live_view import resident_bytes
from spindle.server.routing import Call, Routes

routes = Routes()

LABELLED = {"clients": "client"}  # dicts keyed by what users chose: their keys are values of this label, never part of a name
MAX_LABELS = 100  # of each; the rest is counted


@routes.get("/metrics", prefix="")
async def metrics(call: Call) -> Any:
    counted = {
        "engine": dict(call.server.engine.stats()),
        "server": dict(call.server.stats()) | {"resident_memory_bytes": resident_bytes()},
    }
    accepted = call.request.headers.get("accept", "")
    if "text/plain" not in accepted and "openmetrics" not in accepted:
        return counted
    lines = [f"{name}{labels} {value}" for name, labels, value in numbers(counted, "spindle")]
    return Response("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4; charset=utf-8")


def numbers(value: Any, name: str, labels: str = "") -> Iterator[tuple[str, str, float]]:
    """Every number of a nested dict: the name that its path gives, its labels, itself. Those of a list are labelled by their index."""
    if isinstance(value, int | float):
        yield name, f"{{{labels}}}" if labels else "", float(value)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            if key in LABELLED and isinstance(inner, Mapping):
                for which, one in itertools.islice(inner.items(), MAX_LABELS):
                    yield from numbers(one, f"{name}_{key}", _joined(labels, LABELLED[key], which))
                yield f"{name}_{key}_not_listed", "", float(max(0, len(inner) - MAX_LABELS))
            else:
                yield from numbers(inner, f"{name}_{key}", labels)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from numbers(inner, name, _joined(labels, "index", str(index)))


def _joined(labels: str, label: str, value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'{labels}{"," if labels else ""}{label}="{escaped}"'
