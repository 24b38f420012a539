"""Inputs for the contract of families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

#: Puzzles with one solution each.
PUZZLES = ("1.....3..4....2.", "..3.4......2.1..")


def predict_inputs(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return paths that `deq-zoo predict` takes, and broken ones."""
    good = [folder / "one.txt", folder / "several.txt"]
    good[0].write_text("1 2 | . .\n. . | 1 2\n----+----\n2 1 | . .\n. . | . 1\n")
    good[1].write_text("\n".join(PUZZLES))
    broken = [folder / "impossible.txt", folder / "short.txt", folder / "picture.png"]
    broken[0].write_text("11..............\n")
    broken[1].write_text("12..\n")
    broken[2].write_bytes(b"\x89PNG\xff\xfe and no text")
    return good, broken


def python_input() -> str:
    """Return an argument for `model.predict`."""
    return PUZZLES[0]


def served_input() -> tuple[dict[str, Any], Any]:
    """Return a request to a server, and the same for `model.predict`."""
    return {"puzzle": PUZZLES[0]}, PUZZLES[0]
