"""Inputs for the prediction of the smoke model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from PIL import Image

from tests.zoo.diffusion.nets import write_picture
from tests.zoo.served import as_base64


def predict_inputs(folder: Path) -> tuple[list[Path], list[Path]]:
    """Write two images that can be inverted and two files that cannot be read."""
    good = [folder / "bright.png", folder / "wide.jpg"]
    write_picture(good[0], level=200)
    write_picture(good[1], width=40, height=8)
    broken = [folder / "text.png", folder / "empty.png"]
    broken[0].write_text("no image")
    broken[1].write_bytes(b"")
    return good, broken


def python_input() -> Any:
    """Return an image as a tensor."""
    return torch.linspace(0, 1, 64).view(8, 8)


def served_input() -> tuple[dict[str, Any], Any]:
    """Return a request to a server, and the same for `model.predict`."""
    image = Image.radial_gradient("L").resize((8, 8))
    return {"image": as_base64(image)}, image
