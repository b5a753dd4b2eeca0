"""The live page in a real browser, at a desk and on a phone."""

from __future__ import annotations

import os
import re
from pathlib import Path

import httpx
import pytest

from spindle.server import running
from tests.server.browser import Browser, chromium
from tests.server.wire import NAME, Wire, datum

KEYS = {"ann": "tml-ann-key"}


@pytest.fixture(scope="module")
def browser():
    program = chromium()
    if program is None:
        if os.environ.get("SPINDLE_BROWSER") == "required":
            pytest.fail("no chromium is installed, and SPINDLE_BROWSER=required")
        pytest.skip("no chromium is installed: apt-get install chromium")
    browser = Browser(program)
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def busy(engine, tmp_path_factory):
    """A server whose first model was trained for six steps and its second for three, with two checkpoints and two requests that wait."""
    with running(engine, store=tmp_path_factory.mktemp("store"), name=NAME) as url:
        wire = Wire(url)
        models = [wire.model(), wire.model(rank=8)]
        losses = []
        for model, steps in zip(models, (6, 3), strict=True):
            data = [datum(12, seed=3), datum(9, seed=4)]
            mine = []
            for step in range(steps):
                mine.append(wire.result(wire.train(model, 2 * step + 1, data)).metrics["loss:sum"] / 21)
                wire.result(wire.step(model, 2 * step + 2, learning_rate=1e-2))
            losses.append(mine)
        paths = [
            wire.result(wire.ok("save_weights", model_id=models[0], seq_id=13, path="a-checkpoint-with-a-rather-long-name-to-show"))[
                "path"
            ],
            wire.result(wire.ok("save_weights_for_sampler", model_id=models[1], seq_id=7, path="second"))["path"],
        ]
        for seq_id in (20, 21):
            wire.train(models[0], seq_id, [datum(5)])
        yield url, wire, models, losses, paths


@pytest.mark.parametrize(("where", "width", "height"), [("desk", 1280, 900), ("phone", 390, 844)])
def test_the_page_shows_the_live_server(browser, busy, tmp_path, where, width, height):
    url, _, models, losses, paths = busy
    browser.open(url, width, height, phone=where == "phone")
    browser.wait_for("document.getElementById('state').textContent.startsWith('live')")
    runs = browser.value("[...document.querySelectorAll('.run')].map(run => run.innerText)")
    assert len(runs) == 2
    curves = browser.value("[...document.querySelectorAll('.run')].map(run => run.querySelector('polyline').getAttribute('points'))")
    for model, mine, run, points in zip(models, losses, runs, curves, strict=True):
        assert model in run and NAME in run and f"{mine[-1]:.4f}" in run and f"{len(mine)} steps" in run
        drawn = [tuple(map(float, point.split(","))) for point in points.split()]
        assert len(drawn) == len(mine)
        low, high = min(mine), max(mine)
        for index, ((x, y), loss) in enumerate(zip(drawn, mine, strict=True)):  # the box is 300 wide, its curve from 5 (high) to 85 (low)
            assert x == pytest.approx(300 * index / (len(mine) - 1), abs=0.1)
            assert y == pytest.approx(85 - 80 * (loss - low) / (high - low), abs=0.1)
        assert f"{high:.3f}" in run and f"{low:.3f}" in run  # the scale of the curve
    size = browser.value("(box => [box.width, box.height])(document.querySelector('polyline').getBoundingClientRect())")
    assert size[0] > 200 and size[1] > 50
    tile = "tile => [tile.querySelector('span').textContent, tile.querySelector('b').textContent]"
    tiles = dict(browser.value(f"[...document.querySelectorAll('.tile')].map({tile})"))
    assert tiles["requests waiting"] == "2" and tiles["models"] == "2"
    assert float(re.sub("[^0-9.]", "", tiles["memory"])) > 0 and "B" in tiles["memory"]
    assert tiles["tokens / s"] == "0"
    rows = browser.value("[...document.querySelectorAll('#checkpoints > div')].map(row => row.innerText)")
    assert len(rows) == 2 and all(any(path in row for row in rows) for path in paths)
    assert browser.value("document.documentElement.scrollWidth") <= width
    assert (
        browser.value("[...document.querySelectorAll('body *')].filter(e => e.getBoundingClientRect().right > innerWidth + 0.5).length")
        == 0
    )
    browser.screenshot(Path(os.environ.get("SPINDLE_SCREENSHOTS", tmp_path)) / f"{where}.png")


def test_it_goes_on_showing_what_happens(browser, busy):
    url, wire, *_ = busy
    browser.open(url, 1280, 900)
    browser.wait_for("document.querySelectorAll('.run').length == 2")
    model = wire.model()
    wire.result(wire.train(model, 1, [datum(200, seed=i) for i in range(20)]))
    browser.wait_for(f"document.querySelectorAll('.run').length == 3 && document.body.innerText.includes({model!r})")
    wire.ok("unload_model", model_id=model)
    browser.wait_for("document.querySelectorAll('.run').length == 2")


def test_tokens_per_second_are_those_trained_since_the_last_look(browser, busy):
    url, wire, *_ = busy
    browser.open(url, 1280, 900)
    model = wire.model()
    browser.wait_for("document.getElementById('state').textContent.startsWith('live')")
    seen = "[...document.querySelectorAll('.tile')].find(tile => tile.innerText.includes('tokens / s')).querySelector('b').textContent"
    for seq_id in range(1, 200):
        wire.result(wire.train(model, seq_id, [datum(100, seed=i) for i in range(5)]))
        if browser.value(seen) != "0":
            break
    assert float(browser.value(seen).replace(",", "")) > 0
    wire.ok("unload_model", model_id=model)


def test_a_server_that_is_gone_is_said(browser, engine, tmp_path):
    with running(engine, store=tmp_path, name=NAME) as url:
        browser.open(url, 390, 844, phone=True)
        browser.wait_for("document.getElementById('state').textContent.startsWith('live')")
        assert browser.value("document.getElementById('runs').innerText") == "none yet"
    browser.wait_for("document.getElementById('state').textContent.includes('cannot reach the server')")


def test_a_key_is_asked_for_and_kept_for_the_tab(browser, engine, tmp_path):
    with running(engine, store=tmp_path, name=NAME, api_keys=KEYS) as url:
        wire = Wire(url, KEYS["ann"])
        model = wire.model()
        browser.open(url, 390, 844, phone=True)
        browser.wait_for("document.querySelector('form').offsetWidth > 0")
        assert "asks for an API key" in browser.value("document.body.innerText")
        browser.value("document.querySelector('form input').value = 'tml-wrong'; document.querySelector('form').requestSubmit()")
        browser.wait_for("document.getElementById('state').textContent.includes('is not one of this server')")
        browser.value(f"document.querySelector('form input').value = {KEYS['ann']!r}; document.querySelector('form').requestSubmit()")
        browser.wait_for(f"document.body.innerText.includes({model!r})")
        assert browser.value("document.documentElement.scrollWidth") <= 390
        browser.open(url, 390, 844, phone=True)
        browser.wait_for(f"document.body.innerText.includes({model!r})")
        assert httpx.get(f"{url}/api/v1/live").status_code == 401
        wire.ok("unload_model", model_id=model)
