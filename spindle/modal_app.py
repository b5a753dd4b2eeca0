"""The Modal app: ``spindle modal deploy recipe.toml``, or ``SPINDLE_RECIPE=recipe.toml modal deploy -m spindle.modal_app``.

What is placed where follows from the recipe alone (``recipe.placement_of``); ``spindle.modal`` says why.
"""

# Annotations stay objects here: modal.parameter reads them.
import asyncio
import os
from pathlib import Path
from typing import Any

import modal

from spindle import __version__
from spindle.modal.recipe import Recipe, placement_of
from spindle.modal.wire import WireRequest, WireResponse, decode_request, encode

STORE = "/store"
CHECKOUT = Path(__file__).parent.parent
BUILD = ("g++", "pkg-config", "libzstd-dev")
FRONTEND_PACKAGES = ("numpy>=1.26,<3", "protobuf>=6.33,<8", "msgspec>=0.19", "typer>=0.15", "rich>=13")

recipe = Recipe.from_environment()


def _image(recipe: Recipe, *packages: str, extra: str | None) -> modal.Image:
    """Debian with the packages and Spindle: from the checkout when there is one, else the released version."""
    image = modal.Image.debian_slim(python_version="3.11").apt_install(*BUILD).pip_install(*packages)
    source = CHECKOUT / "pyproject.toml"
    wanted = f"[{extra}]" if extra else ""
    flags = "" if extra else " --no-deps"
    if source.exists():
        ignore = [".git", ".venv*", "build", "demo-output", "**/*.so", "**/__pycache__"]
        image = image.add_local_dir(CHECKOUT, "/spindle", copy=True, ignore=ignore).run_commands(f"pip install{flags} '/spindle{wanted}'")
    else:
        image = image.run_commands(f"pip install{flags} 'spindle-engine{wanted}=={__version__}'")
    return image.env({"SPINDLE_RECIPE_JSON": recipe.to_json(), "HF_HOME": f"{STORE}/huggingface"})


app = modal.App(recipe.name)
volume = modal.Volume.from_name(recipe.store_volume, create_if_missing=True, version=2)
secrets = [modal.Secret.from_name(name) for name in recipe.auth_secrets]
placement = placement_of(recipe)
trainer_image = _image(recipe, "torch>=2.6", extra="server")
frontend_image = _image(recipe, *FRONTEND_PACKAGES, extra=None)


def make_trainer(route: str) -> Any:
    """The trainer of this container: its engine, its part of the store, its keys."""
    from spindle.engine import Engine
    from spindle.modal.trainer import Trainer
    from spindle.server import ServerSettings

    settings = ServerSettings(max_body_bytes=recipe.limits_max_body_mb << 20, session_timeout_s=float(recipe.limits_session_timeout_s))
    keys = [key for key in os.environ.get("SPINDLE_API_KEYS", "").split(",") if key]
    return Trainer(
        lambda: Engine(recipe.base_model, name=recipe.model_name),
        f"{STORE}/{recipe.name}/{route}",
        keys,
        volume.commit,
        settings,
        recipe.model_name,
    )


class _Container:
    """What both kinds of trainer do over a container's life."""

    async def begin(self, route: str) -> None:
        from spindle.server.serve import freeze_heap

        self.trainer = await asyncio.to_thread(make_trainer, route)
        await self.trainer.start()
        freeze_heap()

    async def end(self) -> None:
        await self.trainer.stop()


_options = {"image": trainer_image, "volumes": {STORE: volume}, "secrets": secrets, **placement["trainer"]}

if recipe.frontend_separate:

    @app.cls(**_options)
    @modal.concurrent(max_inputs=recipe.frontend_max_inputs)
    class TrainerContainer(_Container):
        """One trainer per route. A frontend's call brings one request and takes its answer."""

        route: str = modal.parameter(default="0")

        @modal.enter()
        async def enter(self) -> None:
            await self.begin(self.route)

        @modal.exit()
        async def exit(self) -> None:
            await self.end()

        @modal.method()
        async def call(self, request: bytes) -> bytes:
            return encode(await self.trainer.call(decode_request(request)))

    class ModalTransport:
        """A hop of the deployed app."""

        def __init__(self, route: int) -> None:
            self._container = TrainerContainer(route=str(route))  # type: ignore[call-arg]

        async def call(self, request: WireRequest) -> WireResponse:
            import msgspec

            return msgspec.msgpack.decode(await self._container.call.remote.aio(encode(request)), type=WireResponse)

    @app.function(image=frontend_image, **placement["frontend"])
    @modal.concurrent(max_inputs=recipe.frontend_max_inputs)
    @modal.asgi_app(requires_proxy_auth=False)  # the SDK sends Modal no credentials; our keys are checked by the trainer
    def frontend() -> Any:
        from spindle.modal.frontend import Frontend

        return Frontend([ModalTransport(route) for route in range(recipe.trainer_count)], recipe.limits_max_body_mb << 20)

else:

    @app.cls(**_options)
    @modal.concurrent(max_inputs=recipe.frontend_max_inputs)
    class TrainerContainer(_Container):  # type: ignore[no-redef]
        """The trainer and its HTTP server in one container: no hop."""

        @modal.enter()
        async def enter(self) -> None:
            await self.begin("0")

        @modal.exit()
        async def exit(self) -> None:
            await self.end()

        @modal.asgi_app(requires_proxy_auth=False)
        def web(self) -> Any:
            return self.trainer.asgi
