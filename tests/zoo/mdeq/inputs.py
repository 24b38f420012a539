"""Inputs for the contract of families."""

from __future__ import annotations

from pathlib import Path

from PIL import Image


def predict_inputs(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return paths that `deq-zoo predict` takes, and broken ones."""
    good = [folder / "grey.png", folder / "colour.jpg"]
    Image.new("L", (8, 8), 90).save(good[0])
    Image.new("RGB", (20, 30), (10, 200, 30)).save(good[1])
    broken = folder / "broken.png"
    broken.write_bytes(b"\x89PNG and no more")
    return good, [broken]


def python_input() -> Image.Image:
    """Return an argument for `model.predict`."""
    return Image.new("L", (16, 16), 120)
