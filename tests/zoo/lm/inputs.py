"""Inputs for the smoke preset, which the contract of families uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def predict_inputs(folder: Path) -> tuple[list[Path], list[Path]]:
    """Write text files; return those that the model can read, and those that are broken."""
    good, latin, short = (folder / name for name in ("count.txt", "latin.txt", "short.txt"))
    good.write_text(" ".join(str(k) for k in range(100, 130)))
    latin.write_bytes("für alle ".encode("latin-1"))
    short.write_text("1")
    return [good], [latin, short]


def python_input() -> Any:
    """Return an argument for `model.predict`."""
    return "100 101 102 103"


def served_input() -> tuple[dict[str, Any], Any]:
    """Return a request to a server, and the same for `model.predict`."""
    return {"text": python_input()}, python_input()
