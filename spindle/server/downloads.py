"""Files of checkpoints: signed links that expire, served without a key; archives streamed as .tar.gz."""

from __future__ import annotations

import base64
import datetime
import email.utils
import hashlib
import hmac
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from starlette.responses import FileResponse, Response, StreamingResponse

from spindle.errors import InvalidRequest, NotFound
from spindle.server.routing import PREFIX, Call, Routes
from spindle.server.runs import CHECKPOINT, checkpoint_path
from spindle.server.sessions import iso_time
from spindle.server.state import Server
from spindle.store.catalogue import CheckpointRow
from spindle.store.names import TinkerPath

routes = Routes()

LINK_TTL_S = 3600.0
ARCHIVE = "archive.tar.gz"
_BLOCK = 1 << 20


class Link(msgspec.Struct, array_like=True):
    run_id: str
    kind: str
    name: str
    expires_at: float


def sign(server: Server, row: CheckpointRow, expires_at: float) -> str:
    body = msgspec.json.encode(Link(row.run_id, row.kind, row.name, expires_at))
    mac = hmac.digest(server.signing_key, body, hashlib.sha256)
    return base64.urlsafe_b64encode(mac + body).decode().rstrip("=")


def verified(server: Server, token: str) -> CheckpointRow:
    """The checkpoint a link was signed for. Raises NotFound for a link that is not ours or is too old."""
    try:
        raw = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))
        mac, body = raw[:32], raw[32:]
        genuine = hmac.compare_digest(mac, hmac.digest(server.signing_key, body, hashlib.sha256))
        link = msgspec.json.decode(body, type=Link) if genuine else None
    except (ValueError, msgspec.MsgspecError):
        link = None
    if link is None or link.expires_at <= server.catalogue.clock():
        raise NotFound("this download link is not valid or has expired: ask for a new one")
    return server.catalogue.checkpoint(TinkerPath(link.run_id, link.kind, link.name))


def _readable(call: Call) -> CheckpointRow:
    return call.server.readable(str(checkpoint_path(call)), call.owner)


@routes.get(CHECKPOINT + "/archive")
async def archive(call: Call) -> Response:
    """302 to a link that streams the files as .tar.gz."""
    row = _readable(call)
    expires_at = call.server.catalogue.clock() + LINK_TTL_S
    headers = {
        "Location": f"{_base(call)}/files/{sign(call.server, row, expires_at)}/{ARCHIVE}",
        "Expires": email.utils.format_datetime(datetime.datetime.fromtimestamp(expires_at, datetime.UTC), usegmt=True),
    }
    return Response(None, 302, headers)


@routes.get(CHECKPOINT + "/external_weights_urls")
async def urls(call: Call) -> Any:
    row = _readable(call)
    if row.kind != "external_weights":
        raise InvalidRequest(f"{row.path} is of kind {row.kind}: links are given for external_weights, which save_weights_external makes")
    expires_at = call.server.catalogue.clock() + LINK_TTL_S
    base = f"{_base(call)}/files/{sign(call.server, row, expires_at)}"
    files = await call.in_thread(_files, call.server.catalogue.files(row))
    return {"urls": {name: f"{base}/{name}" for name in files}, "expires": iso_time(expires_at)}


@routes.get("/files/{token}/{file:path}", public=True)
async def file(call: Call) -> Response:
    row = verified(call.server, call.path("token"))
    root = call.server.catalogue.files(row)
    name = call.path("file")
    files = await call.in_thread(_files, root)
    if name == ARCHIVE:
        return StreamingResponse(tar_gz(root, files), media_type="application/gzip")
    if name not in files:
        raise NotFound(f"{row.path} has no file {name[:200]!r}")
    return FileResponse(root / name, media_type="application/octet-stream")


def _base(call: Call) -> str:
    return f"{str(call.request.base_url).rstrip('/')}{PREFIX}"


def _files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def tar_gz(root: Path, names: list[str]) -> Iterator[bytes]:
    """The files as one .tar.gz, a block at a time; memory does not grow with them."""
    gzip = zlib.compressobj(1, wbits=31)
    for name in names:
        info = tarfile.TarInfo(name)
        path = root / name
        info.size, info.mtime, info.mode = path.stat().st_size, int(path.stat().st_mtime), 0o644
        yield gzip.compress(info.tobuf(tarfile.PAX_FORMAT))
        with open(path, "rb") as source:
            while block := source.read(_BLOCK):
                yield gzip.compress(block)
        yield gzip.compress(bytes(-info.size % tarfile.BLOCKSIZE))
    yield gzip.compress(bytes(2 * tarfile.BLOCKSIZE))
    yield gzip.flush()
