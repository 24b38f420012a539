"""Random graphs, and solver options that leave nothing but rounding."""

from __future__ import annotations

from typing import Any

import torch

from deq_zoo.ignn import Graphs

TIGHT: dict[str, Any] = {
    "f_max_iter": 3000,
    "f_tol": 1e-14,
    "f_stop_mode": "rel",
    "b_max_iter": 3000,
    "b_tol": 1e-14,
    "on_failure": "ignore",
}


def draw_graph(
    n: int, edges: int, seed: int = 0, sizes: Any = None, dtype: torch.dtype = torch.float64
) -> Graphs:
    """Draw directed edges with weights of both signs, `edges` of them in each part of `sizes`."""
    g = torch.Generator().manual_seed(seed)
    parts, first = [], 0
    for size in sizes or (n,):
        parts.append(first + torch.randint(size, (2, edges), generator=g))
        first += size
    index = torch.cat(parts, dim=1)
    weight = torch.randn(index.shape[1], generator=g, dtype=torch.float64).to(dtype)
    return Graphs.from_edges(index, n, weight, sizes)
