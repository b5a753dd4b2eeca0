"""Recipes: read, checked, placed."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from spindle import cli
from spindle.errors import UserError
from spindle.modal.recipe import EXAMPLE, GPUS, Recipe, placement_of

MINIMAL = {"name": "app", "base_model": "org/model"}


def spindle(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, ["modal", *arguments])
    return result.exit_code, " ".join(result.output.split())


@pytest.mark.parametrize(
    ("tables", "text"),
    [
        ({"name": "app"}, "base_model: missing; a recipe needs name and base_model"),
        ({**MINIMAL, "base_model": ""}, "base_model: got ''; name a model on the hub, or a directory on the volume"),
        ({**MINIMAL, "name": "a b"}, "name: got 'a b'; allowed are 1 to 63 letters, digits, '.', '_' and '-'"),
        ({**MINIMAL, "store": {"volume": "/x"}}, "store.volume: got '/x'; allowed are 1 to 63 letters, digits, '.', '_' and '-'"),
        (
            {**MINIMAL, "trainer": {"gpu": "H1000"}},
            f"trainer.gpu: got 'H1000'; allowed are {', '.join(GPUS)} (say how many with trainer.gpus)",
        ),
        ({**MINIMAL, "trainer": {"gpu": []}}, "trainer.gpu: got []; name at least one GPU"),
        ({**MINIMAL, "trainer": {"gpu": ["H100", 7]}}, "trainer.gpu: got ('H100', 7); allowed is a text or a list of texts"),
        ({**MINIMAL, "trainer": {"gpu": "A10", "gpus": 8}}, "trainer.gpus: got 8; a container has 1 to 4 A10"),
        ({**MINIMAL, "trainer": {"gpus": 0}}, "trainer.gpus: got 0; allowed is a whole number, 1 or more"),
        ({**MINIMAL, "trainer": {"gpus": True}}, "trainer.gpus: got True; allowed is a whole number, 1 or more"),
        ({**MINIMAL, "trainer": {"region": "mars"}}, "trainer.region: got 'mars'; a region looks like us-east, eu-west or ap-southeast"),
        (
            {**MINIMAL, "platform": {"modal": {"region": "US"}}},
            "platform.modal.region: got 'US'; a region looks like us-east, eu-west or ap-southeast",
        ),
        (
            {**MINIMAL, "trainer": {"count": 2}},
            "trainer.count: got 2 with frontend.separate = false; several trainers need a frontend",
        ),
        ({**MINIMAL, "frontend": {"separate": "yes"}}, "frontend.separate: got 'yes'; allowed is true or false"),
        (
            {**MINIMAL, "auth": {"secrets": []}},
            "auth.secrets: got []; name the Modal secret that sets SPINDLE_API_KEYS, for anyone can reach the URL",
        ),
    ],
)
def test_what_is_wrong_is_said(tables, text):
    with pytest.raises(UserError) as caught:
        Recipe.from_tables(tables)
    assert str(caught.value) == text


def test_an_unknown_field_is_not_ignored():
    with pytest.raises(UserError, match=r"^trainer\.gpuz: no such field; allowed are name, base_model, .*trainer\.gpu, .*limits\."):
        Recipe.from_tables({**MINIMAL, "trainer": {"gpuz": "H100"}})


def test_a_recipe_travels_to_a_container_whole(monkeypatch):
    recipe = Recipe.from_tables({**MINIMAL, "trainer": {"gpu": ["H100", "H200"], "region": "us-east"}})
    monkeypatch.setenv("SPINDLE_RECIPE_JSON", recipe.to_json())
    assert Recipe.from_environment() == recipe and recipe.trainer_region == ("us-east",)
    monkeypatch.delenv("SPINDLE_RECIPE_JSON")
    monkeypatch.delenv("SPINDLE_RECIPE", raising=False)
    with pytest.raises(UserError, match="no recipe: set SPINDLE_RECIPE"):
        Recipe.from_environment()


def test_the_frontend_is_placed_in_us_east_unless_the_recipe_says_where():
    apart = {**MINIMAL, "frontend": {"separate": True}}
    for tables, region in ((apart, "us-east"), ({**apart, "platform": {"modal": {"region": "eu-west"}}}, "eu-west")):
        frontend = placement_of(Recipe.from_tables(tables))["frontend"]
        assert (frontend["region"], frontend["routing_region"]) == (region, region)


def test_a_trainer_goes_anywhere_unless_pinned_and_is_one_container():
    for tables, region in ((MINIMAL, None), ({**MINIMAL, "trainer": {"region": ["us-east", "us-west"]}}, ["us-east", "us-west"])):
        trainer = placement_of(Recipe.from_tables(tables))["trainer"]
        assert trainer["region"] == region and trainer["max_containers"] == 1


def test_gpus_are_spelled_as_modal_takes_them():
    for trainer, gpu in (
        ({"gpu": "H100"}, "H100"),
        ({"gpu": "H100", "gpus": 4}, "H100:4"),
        ({"gpu": ["H100", "A100-80GB"], "gpus": 2}, ["H100:2", "A100-80GB:2"]),
    ):
        assert placement_of(Recipe.from_tables({**MINIMAL, "trainer": trainer}))["trainer"]["gpu"] == gpu


def test_init_then_check(tmp_path):
    path = tmp_path / "recipe.toml"
    assert spindle("init", str(path)) == (0, f"wrote {path}: edit it, then spindle modal check {path}")
    assert path.read_text() == EXAMPLE
    assert spindle("init", str(path)) == (1, f"spindle: {path} exists; remove it first, or name another file.")
    status, text = spindle("check", str(path))
    assert status == 0 and "Qwen/Qwen3-8B" in text and "H100 or H200" in text and "no hop: the trainer serves HTTP itself" in text
    path.write_text(EXAMPLE.replace("separate = false", "separate = true"))
    status, text = spindle("check", str(path))
    assert status == 0 and "one hop from frontend to trainer" in text and "us-east" in text


def test_check_of_what_is_no_recipe(tmp_path):
    path = tmp_path / "r.toml"
    status, text = spindle("check", str(path))
    assert (status, text) == (1, f"spindle: {path}: No such file or directory; `spindle modal init {path}` writes an example")
    path.write_text("name = ")
    status, text = spindle("check", str(path))
    assert status == 1 and text.startswith(f"spindle: {path} is not TOML: Invalid value")
    path.write_text('name = "x"\nbase_model = "y"\n[trainer]\ngpu = "T5"')
    status, text = spindle("deploy", str(path))
    assert status == 1 and text.startswith("spindle: trainer.gpu: got 'T5'; allowed are T4,")
