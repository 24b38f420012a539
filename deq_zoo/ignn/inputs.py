"""Graphs as users have them: archives, dicts, pairs of arrays, objects of PyG."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from zipfile import is_zipfile

import numpy as np
import torch
from torch import Tensor

from deq_zoo.arrays import read_archive
from deq_zoo.errors import DataError
from deq_zoo.ignn.data import divide_by_sums
from deq_zoo.ignn.edges import undirected
from deq_zoo.ignn.facts import GraphFacts
from deq_zoo.ignn.graph import Graphs, check_graph, edges_of, normalised_edges, sizes_in_batch

#: The path of an `.npz`, a mapping, a pair `(edge_index, x)`, or an object such as PyG's `Data`.
GraphLike: TypeAlias = Any
_FIELDS = ("edge_index", "x", "edge_weight", "batch", "ptr")
_KINDS = "an .npz file, a dict, a pair (edge_index, x), or an object such as PyG's Data"


class PlainGraph(NamedTuple):
    """A graph, or several, as tensors on the CPU.

    Args:
        edges: (2, E) integers: sources, then targets.
        x: (N, p) features of the nodes, if there are any.
        weight: (E,) weights of the edges, if they have any.
        batch: (N,) the graph of each node, if there are several.
        ptr: (G + 1,) the first node of each graph and the number of nodes, instead of `batch`.
    """

    edges: Tensor
    x: Tensor | None = None
    weight: Tensor | None = None
    batch: Tensor | None = None
    ptr: Tensor | None = None


def read_graph(source: GraphLike) -> PlainGraph:
    """Return what a user gives as a graph; names other than those of `PlainGraph` are not read.

    Args:
        source: arrays `edge_index` (2, E), `x` (N, p), and optionally `edge_weight` (E,) and
            `batch` (N,) or `ptr` (G + 1,), as a file, a mapping or attributes; or a pair
            `(edge_index, x)`.
    """
    if isinstance(source, (str, Path)):
        fields: dict[str, Any] = _read_file(Path(source))
    elif isinstance(source, Mapping):
        fields = dict(source)
    elif isinstance(source, (tuple, list)) and len(source) == 2:
        fields = dict(zip(("edge_index", "x"), source, strict=True))
    else:
        fields = {name: getattr(source, name, None) for name in _FIELDS}
        fields["edge_index"], fields["edge_weight"] = edges_of(source)
    if fields.get("edge_index") is None:
        raise TypeError(f"a graph is {_KINDS} with edge_index: got {_describe(source)}")
    edges, *others = (
        None if fields.get(name) is None else _as_tensor(name, fields[name]) for name in _FIELDS
    )
    assert edges is not None
    return PlainGraph(edges, *others)


def _read_file(path: Path) -> dict[str, Any]:
    if path.is_file() and not is_zipfile(path):  # numpy would take it for a pickle
        raise DataError(f"{path} is no .npz archive of arrays, as numpy.savez writes them")
    return dict(read_archive(path, "edge_index"))


def prepare(graph: PlainGraph, facts: GraphFacts) -> tuple[Tensor | None, Graphs]:
    """Return features and adjacency in the form of the training graphs.

    Edges with weights are taken as they are. Without weights, a model of undirected graphs gets
    every edge once in both directions.

    Args:
        graph: the graph, or several.
        facts: the form of the training graphs.
    """
    x = _features(graph.x, facts)
    nodes = facts.features if x is None else len(x)
    edges, weight, rho = graph.edges, graph.weight, facts.rho
    if weight is not None:
        weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
    sizes = _sizes(graph, nodes)
    check_graph(edges, nodes, weight, sizes)
    if facts.undirected and weight is None:
        edges = undirected(edges.long())
    if facts.normalised:
        if weight is not None and bool((weight < 0).any()):
            rho = None  # that of |A| is no longer 1
        edges, weight = normalised_edges(edges, nodes, weight)
    return x, Graphs.from_edges(edges, nodes, weight, sizes, rho)


def _features(x: Tensor | None, facts: GraphFacts) -> Tensor | None:
    """Return checked features; None where every node is its own feature."""
    if x is None:
        if facts.identity:
            return None
        raise ValueError(
            f"a graph needs x: {facts.features} features for each node, of shape (nodes, "
            f"{facts.features})"
        )
    if x.dim() != 2 or x.shape[1] != facts.features or not len(x):
        raise ValueError(
            f"x must be (nodes, {facts.features}), the features of each node as in training, got "
            f"{tuple(x.shape)}"
        )
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if not bool(x.isfinite().all()):
        raise ValueError("x must be finite, got NaN or infinity")
    return divide_by_sums(x) if facts.unit_rows else x


def _sizes(graph: PlainGraph, nodes: int) -> tuple[int, ...]:
    """Return the number of nodes of each graph."""
    if graph.ptr is not None:
        ends = graph.ptr.flatten().tolist()
        rises = all(isinstance(b, int) and a <= b for a, b in pairwise(ends))
        if len(ends) < 2 or (ends[0], ends[-1]) != (0, nodes) or not rises:
            raise ValueError(
                f"ptr must hold integers that rise from 0 to {nodes}, the number of nodes, got "
                f"{len(ends)} numbers" + (f" from {ends[0]} to {ends[-1]}" if ends else "")
            )
    return tuple(sizes_in_batch(graph, nodes) or (nodes,))


def _as_tensor(name: str, value: Any) -> Tensor:
    """Return numbers as a tensor on the CPU without a graph, or raise `TypeError`."""
    if isinstance(value, Tensor):
        dense = value if value.layout == torch.strided else value.to_dense()
        if dense.is_complex():
            raise TypeError(f"{name} must hold real numbers, got {dense.dtype}")
        return dense.detach().cpu()
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"{name} must hold numbers, got {array.dtype}")
    whole = array.dtype.kind in "iu"  # torch has few operations for unsigned integers
    native = array.dtype.newbyteorder("=")
    return torch.from_numpy(np.array(array, dtype=np.int64 if whole else native))


def _describe(source: Any) -> str:
    if isinstance(source, Mapping):
        return f"a dict of {', '.join(map(str, source)) or 'nothing'}"
    length = f" of {len(source)}" if isinstance(source, (tuple, list)) else ""
    return f"{type(source).__name__}{length}"
