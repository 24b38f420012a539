"""The report in a real browser, where one is installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from deq_zoo.cli import main

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


@pytest.mark.slow
def test_the_report_looks_like_a_page(tmp_path: Path) -> None:
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        pytest.skip(f"no browser is installed (looked for {', '.join(BROWSERS)})")
    run, shot = tmp_path / "run", tmp_path / "shot.png"
    assert main(["train", "mdeq-smoke", "--cpu", "--quiet", "--out", str(run)]) == 0
    subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
         "--window-size=1200,2400", f"--screenshot={shot}", (run / "report.html").as_uri()],
        check=True, timeout=120, capture_output=True,
    )  # fmt: skip
    with Image.open(shot) as picture:
        colours = picture.convert("RGB").resize((120, 240)).getcolors(maxcolors=120 * 240)
    assert colours is not None
    assert len(colours) > 50  # curves and pictures, not an empty page
