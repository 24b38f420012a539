"""Graphs for predictions of the smoke preset, which tells rings from stars."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


def python_input() -> dict[str, Any]:
    """Return a ring of six nodes; a node's feature is its degree, up to 3."""
    node = np.arange(6)
    return {"edge_index": np.stack((node, (node + 1) % 6)), "x": np.eye(3)[[1] * 6]}


def predict_inputs(folder: Path) -> tuple[list[Path], list[Path]]:
    """Write graphs; return the paths of those that can be predicted and of broken ones."""
    good = python_input()
    np.savez(folder / "ring.npz", **good)
    np.savez(folder / "far.npz", edge_index=good["edge_index"] + 1, x=good["x"])
    np.savez(folder / "wide.npz", edge_index=good["edge_index"], x=np.ones((6, 4)))
    (folder / "text.npz").write_text("no archive")
    return [folder / "ring.npz"], [folder / f"{name}.npz" for name in ("far", "wide", "text")]


def served_input() -> tuple[dict[str, Any], Any]:
    """Return a request to a server, and the same for `model.predict`."""
    graph = python_input()
    return {name: array.tolist() for name, array in graph.items()}, graph
