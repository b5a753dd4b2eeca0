"""Who is calling, as the SDK's login and token exchange ask it. Keys come with the start of the server; none is made or revoked here."""

from __future__ import annotations

from typing import Any

from spindle.errors import InvalidRequest
from spindle.server.routing import Call, Routes

routes = Routes()


@routes.post("/auth/token")
async def token(call: Call) -> Any:
    """Hosted Tinker exchanges keys for short-lived tokens; here the key itself stays the credential, and clients are told so."""
    raise InvalidRequest("this server takes API keys as they are: pjwt_auth_enabled is false in its client config")


@routes.get("/auth/apikey/me")
async def me(call: Call) -> Any:
    details = {"org_details": {"name": call.server.name}, "user_details": {"email": call.owner}}
    return {"key_id": 0, "name": call.owner, "note": "", "details": details}


@routes.delete("/auth/apikey/me")
async def revoke(call: Call) -> Any:
    raise InvalidRequest("keys are given to this server when it starts and cannot be revoked from here")
