"""The last line of a bench run is one line of JSON with its figures, after everything pytest prints."""

from __future__ import annotations

import json
import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TINKER_TELEMETRY", "0")

_FIGURES = pytest.StashKey[dict]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_FIGURES] = {}


@pytest.fixture(scope="session")
def figures(request: pytest.FixtureRequest) -> dict:
    """A dict for the whole run: what a bench puts in is printed at its end."""
    return request.config.stash[_FIGURES]


def _plain(value):
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.item() if hasattr(value, "item") else value


def pytest_unconfigure(config: pytest.Config) -> None:
    if figures := config.stash.get(_FIGURES, None):
        print(json.dumps(_plain(figures)), flush=True)
