"""The Modal app is made without an account, and every function gets what the recipe says."""

from __future__ import annotations

import importlib
import sys

import pytest

modal = pytest.importorskip("modal")

RECIPE = """
name = "placed"
base_model = "org/model"
[frontend]
separate = {separate}
max_inputs = 321
[platform.modal]
region = "us-west"
[trainer]
gpu = ["H100", "H200"]
gpus = 2
region = "us-central"
scaledown_window_s = 777
[store]
volume = "a-volume"
[auth]
secrets = ["key-one", "key-two"]
"""


@pytest.fixture
def made(tmp_path, monkeypatch, request):
    """-> the module, and the arguments that each decorator of Modal was given, by the name of what it decorates."""
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.format(separate="true" if request.param else "false"))
    monkeypatch.setenv("SPINDLE_RECIPE", str(path))
    monkeypatch.delenv("SPINDLE_RECIPE_JSON", raising=False)
    given: dict[str, dict] = {}

    def recording(original, kind):
        def decorator(*args, **options):
            given[kind] = options
            return original(*args, **options)

        return decorator

    for owner, name, kind in (
        (modal.App, "function", "frontend"),
        (modal.App, "cls", "trainer"),
        (modal, "concurrent", "concurrent"),
        (modal, "asgi_app", "asgi_app"),
        (modal.Volume, "from_name", "volume"),
    ):
        monkeypatch.setattr(owner, name, recording(getattr(owner, name), kind))
    names: list[str] = []
    from_name = modal.Secret.from_name
    monkeypatch.setattr(modal.Secret, "from_name", lambda name: names.append(name) or from_name(name))
    sys.modules.pop("spindle.modal_app", None)
    module = importlib.import_module("spindle.modal_app")
    yield module, given, names
    sys.modules.pop("spindle.modal_app", None)


@pytest.mark.parametrize("made", [True], indirect=True)
def test_a_frontend_of_its_own(made):
    module, given, secrets = made
    assert isinstance(module.app, modal.App) and module.app.name == "placed"
    frontend, trainer = given["frontend"], given["trainer"]
    assert (frontend["region"], frontend["routing_region"], frontend.get("gpu")) == ("us-west", "us-west", None)
    assert frontend["image"] is module.frontend_image and not frontend.get("volumes") and not frontend.get("secrets")
    assert trainer["gpu"] == ["H100:2", "H200:2"] and trainer["region"] == ["us-central"]
    assert (trainer["max_containers"], trainer["scaledown_window"]) == (1, 777)
    assert trainer["image"] is module.trainer_image and list(trainer["volumes"]) == ["/store"] and len(trainer["secrets"]) == 2
    assert secrets == ["key-one", "key-two"] and given["volume"] == {"create_if_missing": True, "version": 2}
    assert given["concurrent"] == {"max_inputs": 321}
    assert given["asgi_app"] == {"requires_proxy_auth": False}


@pytest.mark.parametrize("made", [False], indirect=True)
def test_one_container_is_trainer_and_frontend(made):
    module, given, _ = made
    assert "frontend" not in given and not hasattr(module, "frontend")
    assert given["trainer"]["routing_region"] == "us-west" and given["trainer"]["region"] == ["us-central"]
    assert given["trainer"]["max_containers"] == 1 and given["asgi_app"] == {"requires_proxy_auth": False}


def test_only_the_app_imports_modal():
    import subprocess

    code = "import sys, spindle.modal.frontend, spindle.modal.recipe; sys.exit('modal' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
