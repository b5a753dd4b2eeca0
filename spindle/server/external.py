"""save_weights_external: an export that other programs load, in PEFT's layout or merged with the base model as a transformers
directory, encrypted when recipients are given.

The SDK's request has no field for the form: ``ServerSettings.external_format`` says which one it gets, ``format`` lets others choose.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

from starlette.responses import Response

from spindle.errors import InvalidRequest
from spindle.operations import SaveState
from spindle.server.answers import encode_json
from spindle.server.bodies import Strict
from spindle.server.futures import Answer, acknowledge
from spindle.server.live import LiveModel
from spindle.server.ordered import submit_in_order
from spindle.server.routing import Call, Routes
from spindle.server.settings import EXTERNAL_FORMATS
from spindle.server.weights import Saving
from spindle.store.catalogue import checkpoint_row
from spindle.store.files import TEMPORARY_PREFIX, new_directory

routes = Routes()

MAX_RECIPIENTS = 10


class SaveExternal(Strict):
    model_id: str
    path: str | None = None
    seq_id: int | None = None
    ttl_seconds: int | None = None
    age_encryption_recipients: list[str] | None = None
    format: str | None = None
    type: str = ""


@routes.post("/save_weights_external")
async def save_external(call: Call) -> Response:
    saving = ExternalSaving(call)
    return acknowledge(
        await submit_in_order(call, SaveExternal, saving.operation, saving.answer, "save_weights_external", slow_answer=True)
    )


class ExternalSaving(Saving):
    def __init__(self, call: Call) -> None:
        super().__init__(call, "external_weights", with_optimizer=False)

    def operation(self, model: LiveModel, request: SaveExternal) -> SaveState:
        form = request.format or self.server.settings.external_format
        if form not in EXTERNAL_FORMATS:
            raise InvalidRequest(f"format is {form[:100]!r}, allowed: {', '.join(EXTERNAL_FORMATS)}")
        self.recipients = age_recipients(request.age_encryption_recipients or [])
        engine = self.server.engine
        base = (engine.model, engine.tokenizer) if form == "merged" else None
        save = dataclasses.replace(super().operation(model, request), merge_into=base)
        if not self.recipients:
            return save
        self.plain = self.files.parent / f"{TEMPORARY_PREFIX}{self.files.name}"
        return dataclasses.replace(save, path=self.plain)

    def answer(self, model: LiveModel, request: SaveExternal, _: Any) -> Answer:
        if self.recipients:
            try:
                encrypt(self.plain, self.files, self.recipients)
            finally:
                shutil.rmtree(self.plain, ignore_errors=True)
        row = checkpoint_row(self.server.catalogue, self.path, model.owner, self.files, request.ttl_seconds)
        self.server.catalogue.add_checkpoint(row)
        if request.ttl_seconds is not None:
            self.server.loop.call_soon_threadsafe(self.server.schedule_expiry)
        return Answer(json=encode_json({"path": str(self.path), "size_bytes": row.size_bytes, "type": "save_weights_external"}))


def age_recipients(texts: list[str]) -> list[Any]:
    """Parsed age recipients. Raises InvalidRequest for one that is none, or when this server cannot encrypt."""
    if not texts:
        return []
    if len(texts) > MAX_RECIPIENTS:
        raise InvalidRequest(f"age_encryption_recipients has {len(texts)} entries, allowed are {MAX_RECIPIENTS}")
    try:
        from pyrage import ssh, x25519
    except ImportError:
        raise InvalidRequest(
            "age_encryption_recipients: this server cannot encrypt; its operator can `pip install pyrage`, or export without recipients"
        ) from None
    recipients = []
    for index, text in enumerate(texts):
        try:
            recipients.append((x25519 if text.startswith("age1") else ssh).Recipient.from_str(text))
        except Exception:
            raise InvalidRequest(f"age_encryption_recipients[{index}] is neither an age1… key nor an SSH public key") from None
    return recipients


def encrypt(plain: Path, target: Path, recipients: list[Any]) -> None:
    """Every file of ``plain`` as ``<name>.age`` in ``target``."""
    import pyrage

    with new_directory(target) as directory:
        for file in plain.iterdir():
            pyrage.encrypt_file(str(file), str(directory / f"{file.name}.age"), recipients)
