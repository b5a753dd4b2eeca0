"""A recipe: what of Spindle runs where on Modal. A small TOML file, checked in full before anything is deployed."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spindle.errors import UserError

__all__ = ["EXAMPLE", "FRONTEND_REGION", "Recipe", "placement_of"]

FRONTEND_REGION = "us-east"
"""Where a frontend is placed when the recipe does not say: next to Modal's own services."""

GPUS = {  # as Modal spells them: the most of one container
    "T4": 8,
    "L4": 8,
    "A10": 4,
    "L40S": 8,
    "A100": 8,
    "A100-40GB": 8,
    "A100-80GB": 8,
    "RTX-PRO-6000": 8,
    "H100": 8,
    "H100!": 8,
    "H200": 8,
    "B200": 8,
    "B200+": 8,
}
BODIES_UNDER_WAY = 16  # of the largest size, that a frontend has memory for
REGION = re.compile(r"(us|eu|ap|uk|ca|me|sa|af|mx|jp)(-[a-z]+)*(-\d)?")

EXAMPLE = """\
# What `spindle modal deploy` puts where. `spindle modal check` prints it without an account.
name = "spindle"                      # of the Modal app; part of its URL
base_model = "Qwen/Qwen3-8B"          # a name on the hub, or a directory on the volume: /store/models/...
# model_name = "Qwen/Qwen3-8B"        # what clients ask for, when base_model is a directory

[platform.modal]
# region = "us-east"                  # where the frontend is placed; us-east when nothing is said

[frontend]
separate = false                      # false: the trainer's container serves HTTP itself, and there is no hop
max_inputs = 1000                     # requests of one frontend container at a time, long polls among them
min_containers = 1

[trainer]
gpu = ["H100", "H200"]                # one, or several in the order they are tried
gpus = 1                              # of one container
count = 1                             # trainers of this base model; more than one needs frontend.separate
# region = ["us-east", "us-west"]     # pins the trainer; by default it goes where a GPU is free
scaledown_window_s = 600              # without a request before the container is given back
startup_timeout_s = 1800              # for loading the model
memory_mb = 32768

[store]
volume = "spindle-store"              # checkpoints and catalogue; made when it is not there

[auth]
secrets = ["spindle-keys"]            # Modal secrets; one of them sets SPINDLE_API_KEYS=tml-...,tml-...

[limits]
max_body_mb = 64
session_timeout_s = 600
"""


@dataclass(frozen=True)
class Recipe:
    """Every field of the file, flat: ``trainer.gpu`` is ``trainer_gpu``. Raises UserError naming the field as the file spells it."""

    name: str
    base_model: str
    model_name: str | None = None
    platform_modal_region: str | None = None
    frontend_separate: bool = False
    frontend_max_inputs: int = 1000
    frontend_min_containers: int = 1
    trainer_gpu: tuple[str, ...] = ("H100",)
    trainer_gpus: int = 1
    trainer_count: int = 1
    trainer_region: tuple[str, ...] = ()
    trainer_scaledown_window_s: int = 600
    trainer_startup_timeout_s: int = 1800
    trainer_memory_mb: int = 32768
    store_volume: str = "spindle-store"
    auth_secrets: tuple[str, ...] = ("spindle-keys",)
    limits_max_body_mb: int = 64
    limits_session_timeout_s: int = 600

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            self._check_type(field.name, getattr(self, field.name), str(field.type))
        for key in ("name", "store_volume"):
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", value := getattr(self, key)):
                raise UserError(f"{spelled(key)}: got {value!r}; allowed are 1 to 63 letters, digits, '.', '_' and '-'")
        if not self.base_model:
            raise UserError("base_model: got ''; name a model on the hub, or a directory on the volume")
        if not self.trainer_gpu:
            raise UserError("trainer.gpu: got []; name at least one GPU")
        for gpu in self.trainer_gpu:
            if gpu not in GPUS:
                raise UserError(f"trainer.gpu: got {gpu!r}; allowed are {', '.join(GPUS)} (say how many with trainer.gpus)")
            if not 1 <= self.trainer_gpus <= GPUS[gpu]:
                raise UserError(f"trainer.gpus: got {self.trainer_gpus}; a container has 1 to {GPUS[gpu]} {gpu}")
        for key, regions in (("platform.modal.region", (self.frontend_region,)), ("trainer.region", self.trainer_region)):
            for region in regions:
                if not REGION.fullmatch(region):
                    raise UserError(f"{key}: got {region!r}; a region looks like us-east, eu-west or ap-southeast")
        if not self.auth_secrets:
            raise UserError("auth.secrets: got []; name the Modal secret that sets SPINDLE_API_KEYS, for anyone can reach the URL")
        if self.trainer_count > 1 and not self.frontend_separate:
            raise UserError(f"trainer.count: got {self.trainer_count} with frontend.separate = false; several trainers need a frontend")

    def _check_type(self, key: str, value: Any, kind: str) -> None:
        if kind.startswith("tuple"):
            good, wanted = isinstance(value, tuple) and all(isinstance(item, str) for item in value), "a text or a list of texts"
        elif kind == "int":
            least = 0 if key == "frontend_min_containers" else 1
            good, wanted = type(value) is int and value >= least, f"a whole number, {least} or more"
        elif kind == "bool":
            good, wanted = isinstance(value, bool), "true or false"
        else:
            good, wanted = isinstance(value, str) or (value is None and "None" in kind), "a text"
        if not good:
            raise UserError(f"{spelled(key)}: got {value!r}; allowed is {wanted}")

    @property
    def frontend_region(self) -> str:
        return FRONTEND_REGION if self.platform_modal_region is None else self.platform_modal_region

    @property
    def gpu(self) -> str | list[str]:
        """As Modal takes it: ``"H100"``, ``"H100:2"``, or a list of such in the order they are tried."""
        names = [gpu if self.trainer_gpus == 1 else f"{gpu}:{self.trainer_gpus}" for gpu in self.trainer_gpu]
        return names[0] if len(names) == 1 else names

    @classmethod
    def load(cls, path: str | Path) -> Recipe:
        """Read a TOML file. Raises UserError, also for a file that is not there or not TOML."""
        try:
            return cls.from_tables(tomllib.loads(Path(path).read_text()))
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}; `spindle modal init {path}` writes an example") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UserError(f"{path} is not TOML: {error}") from None

    @classmethod
    def from_tables(cls, tables: dict[str, Any]) -> Recipe:
        """From what ``tomllib`` makes of the file."""
        flat = dict(_flatten(tables))
        known = {field.name: str(field.type) for field in dataclasses.fields(cls)}
        by_spelling = {spelled(key): key for key in known}
        for name in flat:
            if name not in by_spelling:
                raise UserError(f"{name}: no such field; allowed are {', '.join(by_spelling)}")
        for name in ("name", "base_model"):
            if name not in flat:
                raise UserError(f"{name}: missing; a recipe needs name and base_model")
        values: dict[str, Any] = {}
        for name, value in flat.items():
            key = by_spelling[name]
            if known[key].startswith("tuple") and isinstance(value, str | list):
                value = (value,) if isinstance(value, str) else tuple(value)
            values[key] = value
        return cls(**values)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_environment(cls) -> Recipe:
        """The recipe of this deployment: the file ``$SPINDLE_RECIPE`` here, ``$SPINDLE_RECIPE_JSON`` in a container."""
        if text := os.environ.get("SPINDLE_RECIPE_JSON"):
            values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in json.loads(text).items()}
            return cls(**values)
        if path := os.environ.get("SPINDLE_RECIPE"):
            return cls.load(path)
        raise UserError("no recipe: set SPINDLE_RECIPE to its path, or run `spindle modal deploy recipe.toml`")


def placement_of(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Every function's placement and resources, as Modal takes them, without images, volumes and secrets."""
    trainer: dict[str, Any] = {
        "gpu": recipe.gpu,
        "memory": recipe.trainer_memory_mb,
        "region": list(recipe.trainer_region) or None,
        "max_containers": 1,  # an adapter lives in one process
        "scaledown_window": recipe.trainer_scaledown_window_s,
        "startup_timeout": recipe.trainer_startup_timeout_s,
        "timeout": 24 * 3600,
    }
    if not recipe.frontend_separate:
        return {"trainer": trainer | {"routing_region": recipe.frontend_region}}
    frontend = {
        "region": recipe.frontend_region,  # where it runs
        "routing_region": recipe.frontend_region,  # where its requests enter
        "min_containers": recipe.frontend_min_containers,
        "memory": 1024 + BODIES_UNDER_WAY * recipe.limits_max_body_mb,
        "timeout": 300,
    }
    return {"frontend": frontend, "trainer": trainer}


def spelled(key: str) -> str:
    """``trainer_gpu`` -> ``trainer.gpu``, as the file has it."""
    for table in ("platform_modal", "frontend", "trainer", "store", "auth", "limits"):
        if key.startswith(f"{table}_"):
            return f"{table.replace('_', '.')}.{key.removeprefix(f'{table}_')}"
    return key


def _flatten(tables: dict[str, Any], prefix: str = ""):
    for key, value in tables.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
