"""What clients are told about this server: health, capabilities, flags; and where their telemetry goes (nowhere)."""

from __future__ import annotations

from typing import Any

import msgspec

from spindle.server.keys import is_loopback
from spindle.server.routing import Call, Routes
from spindle.server.settings import ServerSettings

routes = Routes()

OVERHEAD_BYTES = 4 << 20  # of a body beyond what the SDK counts: names, shapes, spans


def client_config(settings: ServerSettings, host: str) -> dict[str, Any]:
    """The SDK's flags for a client at the address ``host``. On loopback bytes are cheap and cycles are not: nothing is compressed."""
    return {
        "pjwt_auth_enabled": False,
        "credential_default_source": "api_key",
        "parallel_fwdbwd_chunks": True,
        "proto_compress_fwdbwd": not is_loopback(host),
        "fwdbwd_max_chunk_len": 4096,
        "fwdbwd_max_chunk_bytes_count": settings.max_body_bytes - min(OVERHEAD_BYTES, settings.max_body_bytes // 2),
        "fwdbwd_dispatch_bytes_semaphore_size": 4 * settings.max_body_bytes,
        "inflight_response_bytes_semaphore_size": 512 << 20,
        "sample_dispatch_bytes_semaphore_size": 64 << 20,
        "sample_max_concurrent_requests": 2000,
        "sample_use_retrieve_futures": False,
        "sample_join_sampling_session": True,
        "create_model_via_load_weights": True,
        "custom_loss_server_side": True,
    } | dict(settings.client_config)


def client_address(call: Call) -> str:
    """Where the client is; "" when a proxy stands between, for then it may be anywhere."""
    headers, client = call.request.headers, call.request.client
    return "" if client is None or "x-forwarded-for" in headers or "forwarded" in headers else client.host


@routes.get("/healthz", public=True)
async def healthz(call: Call) -> Any:
    return {"status": "ok"}


@routes.get("/get_server_capabilities")
async def capabilities(call: Call) -> Any:
    context = call.server.engine.model.max_context
    return {
        "supported_models": [
            {"model_name": name, "max_context_length": context, "trainable": True, "sampleable": True} for name in call.server.names
        ]
    }


class ConfigRequest(msgspec.Struct):
    sdk_version: str = ""


@routes.post("/client/config", public=True)
async def config(call: Call) -> Any:
    await call.json(ConfigRequest)
    return client_config(call.server.settings, client_address(call))


@routes.post("/client/dynamic_config", public=True)
async def dynamic_config(call: Call) -> Any:
    await call.json(ConfigRequest)
    return {"refresh_interval_sec": 300, "sample_cancel_enabled": True, "sample_cancel_max_batch_size": 64}


@routes.post("/telemetry", public=True)
async def telemetry(call: Call) -> Any:
    """Clients send it unasked; it is read and dropped."""
    await call.body()
    return {"status": "accepted"}
