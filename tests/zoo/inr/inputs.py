"""Inputs of the smoke model, for the contract of families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def predict_inputs(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return no files: a field takes coordinates."""
    return [], []


def python_input() -> tuple[int, int]:
    """Return a size at which the smoke model renders its image."""
    return (8, 8)


def served_input() -> tuple[dict[str, Any], Any]:
    """Return a request to a server, and the same for `model.predict`."""
    points = [[-0.5, 0.25], [0.0, 1.0], [0.75, -1.0]]
    return {"points": points}, torch.tensor(points)
