"""Edges and rows as files give them: brought into order, and checked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized
from operator import index
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deq_zoo.errors import DataError
from deq_zoo.ignn.data import NodeSet


def edge_pairs(ends: Iterable[tuple[Any, Any]]) -> Tensor:
    """Return (2, E) sources and targets, which must be integers; E may be 0."""
    pairs = [(index(a), index(b)) for a, b in ends]
    return torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).mT


def undirected(edges: Tensor) -> Tensor:
    """Return every edge once in both directions, without loops."""
    return once(torch.cat((edges, edges.flip(0)), dim=1))


def once(edges: Tensor) -> Tensor:
    """Return every edge once, without loops, in order."""
    n = int(edges.max()) + 1 if edges.numel() else 1
    keys = (edges[0] * n + edges[1])[edges[0] != edges[1]].unique()
    return torch.stack((keys // n, keys % n))


def check_edges(where: Path, edges: Tensor, sizes: Sequence[int], *aligned: Sized) -> None:
    """Raise `DataError` unless edges join nodes of one graph and every node has its rows.

    Args:
        where: the file, for the error.
        edges: (2, E).
        sizes: nodes of each graph.
        *aligned: rows for the nodes.
    """
    n = sum(sizes)
    check_rows(where, n, *aligned)
    if edges.dim() != 2 or edges.shape[0] != 2 or min(sizes, default=0) < 0:
        raise DataError(
            f"{where}: edges must be (2, E), in graphs of so many nodes, got {tuple(edges.shape)} "
            f"in {len(sizes)} graphs"
        )
    if edges.numel() and not 0 <= int(edges.min()) <= int(edges.max()) < n:
        raise DataError(
            f"{where}: edges must join nodes 0 to {n - 1}, got {int(edges.min())} to "
            f"{int(edges.max())}"
        )
    source, target = torch.repeat_interleave(torch.tensor(sizes, dtype=torch.int64))[edges]
    if not torch.equal(source, target):
        raise DataError(f"{where}: an edge joins two of the graphs")


def check_rows(where: Path, n: int, *aligned: Sized) -> None:
    """Raise `DataError` unless there are as many rows of each kind as nodes."""
    for each in aligned:
        if len(each) != n:
            raise DataError(f"{where}: there are {n} nodes, but {len(each)} rows for them")


def checked_splits(where: Path, nodes: NodeSet) -> NodeSet:
    """Return the set; raise `DataError` if its splits or classes cannot be.

    Splits must name nodes that exist, none of them twice, and some for training.
    """
    n = len(nodes.y)
    splits = torch.cat((nodes.train, nodes.val, nodes.test))
    if len(splits) and not 0 <= int(splits.min()) <= int(splits.max()) < n:
        raise DataError(
            f"{where}: a split must name nodes 0 to {n - 1}, got {int(splits.min())} to "
            f"{int(splits.max())}"
        )
    times = torch.bincount(splits, minlength=n)
    if bool((times > 1).any()):
        raise DataError(
            f"{where}: training, validation and test must share no node, but node "
            f"{int(times.argmax())} is named {int(times.max())} times"
        )
    if not len(nodes.train):
        raise DataError(f"{where} leaves no nodes to train on")
    if float(nodes.y.min()) < 0:
        raise DataError(f"{where}: classes count from 0, got {float(nodes.y.min()):g}")
    return nodes
