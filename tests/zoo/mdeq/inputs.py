"""Inputs for the contract of families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from PIL import Image

from tests.zoo.served import as_base64


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


def served_input() -> tuple[dict[str, Any], Any]:
    """Return a request to a server, and the same for `model.predict`."""
    image = Image.radial_gradient("L").resize((20, 30))
    return {"image": as_base64(image)}, image
