"""The server in a process of its own: under load, at its end, and in a browser."""

from __future__ import annotations

import asyncio
import re
import threading
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

pytest.importorskip("fastapi", reason="the extra serve is not installed")

from benchmarks.load import Outcome, make_calls, send_all
from benchmarks.serving import measure, running_server
from tests.zoo.serving.browser import Browser

pytestmark = pytest.mark.slow

UPLOAD = """(async () => {
  const canvas = new OffscreenCanvas(64, 48), pen = canvas.getContext("2d");
  for (let k = 0; k < 8; k++) {
    pen.fillStyle = `hsl(${45 * k} 70% 55%)`;
    pen.fillRect(8 * k, 6 * k, 30, 20);
  }
  const files = new DataTransfer();
  files.items.add(new File([await canvas.convertToBlob()], "blocks.png", {type: "image/png"}));
  const input = document.querySelector("input[type=file]");
  input.files = files.files;
  input.dispatchEvent(new Event("change"));
  document.getElementById("send").click();
})()"""


def test_every_request_of_a_load_is_answered_and_memory_stays_flat(run: Path) -> None:
    with running_server(run) as server:
        figures = measure(server, 2000)
        code, seconds, errors = server.stop()
    assert figures["unexpected"] == 0, figures
    assert sum(figures["outcomes"].values()) == 2000
    before, after = figures["resident_mb"]
    assert after < 1.1 * before + 20, figures
    assert code == 0
    assert seconds < 40
    assert re.fullmatch(r"deq-zoo: \d+ requests accepted; answers by status: .*\n", errors)
    print(figures)


def test_a_signal_under_load_loses_no_accepted_request(run: Path) -> None:
    calls = make_calls(1000, bad=0.0, leaving=0.0)
    outcomes: list[Outcome] = []
    with running_server(run) as server:
        load = threading.Thread(
            target=lambda: outcomes.extend(asyncio.run(send_all(server.port, calls)))
        )
        load.start()
        load.join(4.0)
        assert load.is_alive(), "the load ended before the signal"
        code, seconds, errors = server.stop()
        load.join(60)
    assert not load.is_alive()
    fates = Counter(outcome.fate for outcome in outcomes)
    assert len(outcomes) == 1000
    assert fates["silent"] == 0
    assert fates["refused"] > 0, "the server still listened"
    answered = [outcome for outcome in outcomes if outcome.fate == "answered"]
    assert {outcome.status for outcome in answered} == {200}
    accepted = int(errors.split(" requests accepted")[0].split()[-1])
    assert accepted == len(answered) > 0, (fates, errors)
    assert code == 0
    assert seconds < 40
    print(fates, errors, seconds)


def test_the_page_shows_an_answer_on_every_screen(run: Path, tmp_path: Path) -> None:
    browser = Browser(tmp_path / "profile")
    try:
        with running_server(run) as server:
            for width, scheme in ((390, "light"), (1280, "dark"), (390, "dark"), (1280, "light")):
                browser.show(f"http://127.0.0.1:{server.port}/", width, 844, scheme)
                browser.wait_for("!!document.querySelector('input[type=file]')")
                browser.evaluate(UPLOAD)
                browser.wait_for("!!document.querySelector('.bars li')")
                assert (
                    browser.evaluate("document.querySelector('#model').textContent") == "mdeq-smoke"
                )
                assert browser.evaluate("document.querySelector('.label').textContent") in "0123"
                assert browser.evaluate("document.documentElement.scrollWidth") <= width
                shot = tmp_path / f"{width}-{scheme}.png"
                browser.shoot(shot)
                assert _colours(shot) > 20
            browser.evaluate(UPLOAD.replace("await canvas.convertToBlob()", "'no image'"))
            browser.wait_for("!!document.querySelector('.error')")
            assert "(status 415)" in browser.evaluate(
                "document.querySelector('.error').textContent"
            )
    finally:
        browser.close()


def _colours(path: Path) -> int:
    with Image.open(path) as picture:
        colours = picture.convert("RGB").getcolors(maxcolors=1 << 24)
    return len(colours or ())
