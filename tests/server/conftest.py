"""One engine on a tiny Llama for all server tests, served from a thread of this process."""

from __future__ import annotations

import pytest
import tinker

from spindle.compute.model import BaseModel
from spindle.engine import Engine
from spindle.server import running
from tests.server.wire import Wire
from tests.tiny import tiny_llama

NAME = "spindle/tiny"


@pytest.fixture(scope="session")
def model():
    return BaseModel.load(tiny_llama())


@pytest.fixture(scope="session")
def engine(model):
    with Engine(model) as engine:
        yield engine


@pytest.fixture(scope="module")
def url(engine, tmp_path_factory):
    with running(engine, store=tmp_path_factory.mktemp("store"), name=NAME, aliases=["spindle/alias"]) as url:
        yield url


@pytest.fixture
def wire(url):
    wire = Wire(url)
    yield wire
    wire.close()


@pytest.fixture
def service(url):
    service = tinker.ServiceClient(base_url=url, api_key="tml-test-key")
    yield service
    service.close("success").result(timeout=30)
