"""The golden cases: weights and tensors of the original implementation, in float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from deq_zoo.ignn import Graphs

SHARED = Path(__file__).parents[4] / "shared"  # golden numbers and data, where present
GOLDEN = SHARED / "golden" / "ignn"
DATA = SHARED / "data"
CLOSE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-9}
TIGHT: dict[str, Any] = {
    "f_max_iter": 3000,
    "f_tol": 1e-14,
    "f_stop_mode": "rel",
    "b_max_iter": 3000,
    "b_tol": 1e-14,
    "on_failure": "ignore",
}


def golden(name: str) -> dict[str, Tensor]:
    """The tensors of one file."""
    if not GOLDEN.is_dir():
        pytest.skip("the golden data is not here")
    held = load_file(GOLDEN / f"{name}.safetensors")
    return {k: v.double() if v.is_floating_point() else v for k, v in held.items()}


def facts(name: str) -> Any:
    return json.loads((GOLDEN / name).read_text())


def below(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names start so, without that."""
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def data(folder: str) -> str:
    """A folder of real data, if it is there."""
    if not (DATA / folder).is_dir():
        pytest.skip(f"the data {folder} is not here")
    return str(DATA / folder)


def random_graph(
    n: int, edges: int, seed: int = 0, sizes: Any = None, dtype: torch.dtype = torch.float64
) -> Graphs:
    """Random directed edges with random weights of both signs."""
    g = torch.Generator().manual_seed(seed)
    parts, first = [], 0
    for size in sizes or (n,):
        parts.append(first + torch.randint(size, (2, edges), generator=g))
        first += size
    index = torch.cat(parts, dim=1)
    weight = torch.randn(index.shape[1], generator=g, dtype=torch.float64).to(dtype)
    return Graphs.from_edges(index, n, weight, sizes)
