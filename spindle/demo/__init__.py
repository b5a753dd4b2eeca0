"""The demo: sixty questions about an invented railway, taught to a small model through the unmodified ``tinker`` SDK.

A server is started on loopback in another process; everything here is client code that would run against any Tinker server,
apart from two looks at what the server counted and where it keeps its files.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from spindle.demo.model import DemoModel, ModelMissing, resolve

__all__ = ["DemoFailed", "run"]

QUESTIONS = Path(__file__).parent / "brindle_line.jsonl"
INSTRUCTION = "Answer in one sentence."
ASKED = ("Who drives the Moth?", "Who drives the Wagtail?")  # as they were taught
BATCH = 6
API_KEY = "tml-demo-key"


class DemoFailed(Exception):
    """The demo cannot go on; says what to do."""


@dataclass
class Measured:
    """What the run took. step_s, compute_s: one entry per optimizer step; loss: nats per answer token of each step."""

    loss: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    compute_s: list[float] = field(default_factory=list)
    tokens: int = 0


def run(
    model: str | None = None,
    output: str | Path = "demo-output",
    epochs: int = 5,
    rank: int = 16,
    learning_rate: float = 2e-3,
    devices: str = "auto",
    console: Console | None = None,
) -> dict[str, Any]:
    """Run the whole demo and print it; returns its figures. Raises DemoFailed."""
    console = console or Console(highlight=False)
    output = Path(output).resolve()
    output.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    began = time.monotonic()
    try:
        import tinker
    except ImportError:
        raise DemoFailed('the demo needs the tinker SDK: pip install -e ".[demo]" where Spindle lies') from None
    try:
        with console.status(f"preparing {model or 'SmolLM2-135M-Instruct'} (about a minute, once)"):
            served = resolve(model)
    except ModelMissing as error:
        raise DemoFailed(str(error)) from None
    if served.root is not None:
        os.environ["HF_HUB_OFFLINE"] = "1"
        os.chdir(served.root)  # the SDK loads the tokenizer by the served name: from here it is a path
    with server(served, output, devices, console) as url:
        try:
            before, after, measured, saved = train(url, served, epochs, rank, learning_rate, console)
        except tinker.TinkerError as error:
            raise DemoFailed(f"the server did not do its part: {error}\n(its log: {output / 'server.log'})") from error
    files = checkpoint_dir(output / "store", saved)
    figures = report(console, before, after, measured, saved, files, plot(measured, output / "loss.png"))
    figures["demo_s"] = time.monotonic() - began
    console.print(f"The whole demo took {figures['demo_s']:.0f} s. Again with another model: spindle demo --model NAME_OR_PATH")
    return figures


@contextlib.contextmanager
def server(model: DemoModel, output: Path, devices: str, console: Console) -> Iterator[str]:
    """``spindle serve`` in a process of its own, as a user would start it. Yields its URL once it answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "spindle.cli", "serve", model.source, "--name", model.name, "--port", str(port)]
    command += ["--store", str(output / "store"), "--api-key", API_KEY, "--devices", devices]
    log = output / "server.log"
    url = f"http://127.0.0.1:{port}"
    with open(log, "w") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT)
    try:
        with console.status("starting a Spindle server on loopback"):
            while not _answers(url):
                if process.poll() is not None:
                    raise DemoFailed(f"the server stopped with status {process.returncode}:\n{log.read_text()[-2000:]}\n(all of it: {log})")
                time.sleep(0.1)
        console.print(f"[green]✓[/] serving {model.name} on {url} (process {process.pid}, log {log})")
        yield url
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/api/v1/healthz", timeout=2) as answer:
            return answer.status == 200
    except OSError:
        return False


def compute_seconds(url: str) -> float:
    """Seconds the server's devices have computed for training so far."""
    request = urllib.request.Request(f"{url}/metrics", headers={"X-API-Key": API_KEY})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)["engine"]["compute_s"]


def train(
    url: str, served: DemoModel, epochs: int, rank: int, learning_rate: float, console: Console
) -> tuple[list[str], list[str], Measured, str]:
    """The client's part, in the SDK's own words. Returns the answers before and after, what it took, and the saved path."""
    import tinker

    service = tinker.ServiceClient(base_url=url, api_key=API_KEY)
    client = service.create_lora_training_client(base_model=served.name, rank=rank, seed=0).result()
    tokenizer = client.get_tokenizer()
    pairs = [json.loads(line) for line in QUESTIONS.read_text().splitlines()]
    data = [datum(tinker, tokenizer, **pair) for pair in pairs]
    console.print(f"[green]✓[/] an adapter of rank {rank} through tinker {tinker.__version__}; {len(data)} questions to learn")

    before = ask(tinker, client, tokenizer)
    measured = Measured()
    order = random.Random(0)
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  {task.fields[rate]:.0f} tokens/s"),
        TimeRemainingColumn(),
    )
    steps = epochs * -(-len(data) // BATCH)
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("train", total=steps, loss=float("nan"), rate=0.0)
        for epoch in range(epochs):
            shuffled = order.sample(data, len(data))
            for start in range(0, len(shuffled), BATCH):
                step(tinker, client, url, shuffled[start : start + BATCH], learning_rate, measured)
                rate = measured.tokens / sum(measured.step_s)
                progress.update(bar, advance=1, loss=measured.loss[-1], rate=rate)
            if not console.is_terminal:  # a log cannot show a bar that moves
                console.print(f"epoch {epoch + 1} of {epochs}: loss {measured.loss[-1]:.3f}, {rate:.0f} tokens/s")
    after = ask(tinker, client, tokenizer)

    saved = client.save_state("brindle-line").result().path
    service.close("success").result()
    return before, after, measured, saved


def datum(tinker: Any, tokenizer: Any, question: str, answer: str) -> Any:
    """A question and its answer as a training datum: weight 1 on the answer's tokens and the end token, 0 on the question's."""
    prompt = prompt_tokens(tokenizer, question)
    tokens = prompt + tokenizer.encode(answer, add_special_tokens=False) + [tokenizer.eos_token_id]
    weights = [0.0] * (len(prompt) - 1) + [1.0] * (len(tokens) - len(prompt))
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights}
    )


def prompt_tokens(tokenizer: Any, question: str) -> list[int]:
    """With the model's chat template when it has one, as plain text when not."""
    if not tokenizer.chat_template:
        return tokenizer.encode(f"Question: {question}\nAnswer:")
    chat = [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": question}]
    return list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False))


def step(tinker: Any, client: Any, url: str, batch: list[Any], learning_rate: float, measured: Measured) -> None:
    """One forward_backward and one optim_step, both sent before either is awaited."""
    computed, began = compute_seconds(url), time.monotonic()
    gradient = client.forward_backward(batch, "cross_entropy")
    update = client.optim_step(tinker.AdamParams(learning_rate=learning_rate, beta2=0.95, eps=1e-8, grad_clip_norm=1.0))
    loss = gradient.result().metrics["loss:sum"]
    update.result()
    measured.step_s.append(time.monotonic() - began)
    measured.compute_s.append(compute_seconds(url) - computed)
    measured.tokens += sum(one.model_input.length for one in batch)
    measured.loss.append(loss / sum(sum(one.loss_fn_inputs["weights"].to_numpy()) for one in batch))


def ask(tinker: Any, client: Any, tokenizer: Any) -> list[str]:
    """The adapter's greedy answers, as it is now."""
    sampler = client.save_weights_and_get_sampling_client().result()
    params = tinker.SamplingParams(max_tokens=32, temperature=0.0, stop=[tokenizer.eos_token_id])
    prompts = [tinker.ModelInput.from_ints(prompt_tokens(tokenizer, question)) for question in ASKED]
    futures = [sampler.sample(prompt=prompt, num_samples=1, sampling_params=params) for prompt in prompts]
    return [tokenizer.decode(one.result().sequences[0].tokens, skip_special_tokens=True).strip() for one in futures]


def checkpoint_dir(store: Path, saved: str) -> Path:
    """Where on disk the checkpoint ``tinker://…`` lies. The server that held the store must have stopped."""
    from spindle.store.catalogue import Catalogue
    from spindle.store.names import parse_path

    catalogue = Catalogue(store)
    try:
        return catalogue.files(catalogue.checkpoint(parse_path(saved)))
    finally:
        catalogue.close()


def plot(measured: Measured, path: Path) -> Path | None:
    """The loss curve as PNG; None without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(range(1, len(measured.loss) + 1), measured.loss, color="#7a1f5c", linewidth=2)
    axes.set(xlabel="optimizer step", ylabel="loss (nats per answer token)", title="Sixty questions about the Brindle Line", ylim=(0, None))
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def report(
    console: Console, before: list[str], after: list[str], measured: Measured, saved: str, files: Path, curve: Path | None
) -> dict[str, Any]:
    """Print what happened; returns the figures."""
    answers = Table("question", "before", "after", title="greedy answers", show_lines=True)
    for question, was, now in zip(ASKED, before, after, strict=True):
        answers.add_row(question, was, f"[bold]{now}[/]")
    console.print(answers)
    steps = len(measured.step_s)
    outside = sum(measured.step_s) - sum(measured.compute_s)
    figures: dict[str, Any] = {
        "steps": steps,
        "first_loss": measured.loss[0],
        "last_loss": measured.loss[-1],
        "tokens_per_s": measured.tokens / sum(measured.step_s),
        "step_s": sum(measured.step_s) / steps,
        "outside_compute_s": outside / steps,
        "before": before,
        "after": after,
        "saved": saved,
        "adapter_dir": str(files),
        "curve": str(curve) if curve else None,
    }
    for name, value in {
        "loss per answer token": f"{figures['first_loss']:.3f} → {figures['last_loss']:.3f} in {steps} steps",
        "speed": f"{figures['tokens_per_s']:.0f} tokens/s, {1e3 * figures['step_s']:.0f} ms per step",
        "not compute": f"{1e3 * figures['outside_compute_s']:.1f} ms per step, as the client saw it",
        "adapter (PEFT layout)": files,
        "its path for the SDK": saved,
        "loss curve": curve or "not drawn: pip install matplotlib",
    }.items():
        console.print(f"{name:<22} {value}", soft_wrap=True)
    return figures
