"""Graphs as the layers take them: sparse rows, both directions, several side by side.

The weight `A[i, j]` belongs to the edge from node `i` to node `j`; a layer multiplies by
`A^T`, so messages flow along the edges.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deq_zoo.ignn.sparse import Both, block_diagonal, multiply, perron_roots, sparse_rows

MARGIN = 1e-5  # added to the Perron root, as published


class Graphs(NamedTuple):
    """One graph, or several as one block-diagonal adjacency; make it with `from_edges`.

    A tuple of tensors: it moves to a device like any batch. The Perron root of each graph is
    estimated once, when the graph is made, and goes wherever the graph goes.

    Args:
        incoming: (N, N) sparse rows of `A^T`, for messages into each node.
        outgoing: (N, N) sparse rows of `A`, for gradients.
        slots: (N,) place of each node in the padded `(G * n_max)` layout.
        rho: (G,) largest eigenvalue of `|A|` of each graph, with a margin.
        sizes: nodes of each graph.
        alike: whether all graphs have the same `rho`.
    """

    incoming: Tensor
    outgoing: Tensor
    slots: Tensor
    rho: Tensor
    sizes: tuple[int, ...]
    alike: bool

    @property
    def sparse(self) -> bool:
        """Return whether products use sparse matrices."""
        return True

    @classmethod
    def from_edges(
        cls,
        edge_index: Tensor,
        nodes: int,
        weight: Tensor | None = None,
        sizes: Sequence[int] | None = None,
        rho: float | None = None,
    ) -> Graphs:
        """Return a graph made from its edges; weights of repeated edges add up.

        Args:
            edge_index: (2, E) integers: sources, then targets.
            nodes: the number of nodes.
            weight: (E,) weights of the edges, 1 by default; they are constants.
            sizes: nodes of each graph, in order, if there are several.
            rho: the Perron root with a margin; None estimates that of each graph.
        """
        sizes = (nodes,) if sizes is None else tuple(int(size) for size in sizes)
        check_graph(edge_index, nodes, weight, sizes)
        source, target = edge_index.long()
        if weight is None:
            weight = torch.ones(len(source), device=source.device)
        incoming = sparse_rows(target, source, weight, nodes)
        outgoing = sparse_rows(source, target, weight, nodes)
        slots = _slots(sizes).to(source.device)
        if rho is None:
            roots = perron_roots(incoming, sizes) + MARGIN
        else:
            rho = _positive(rho)
            roots = torch.full((len(sizes),), rho, dtype=torch.float64, device=source.device)
        return cls(incoming, outgoing, slots, roots, sizes, _are_alike(roots))

    @classmethod
    def union(cls, parts: Sequence[Graphs]) -> Graphs:
        """Return graphs side by side, without edges between them; their Perron roots are kept."""
        if not parts:
            raise ValueError("a union needs at least one graph")
        if len(parts) == 1:
            return parts[0]
        sizes = tuple(size for part in parts for size in part.sizes)
        rho = torch.cat([part.rho for part in parts])
        alike = all(part.alike for part in parts) and _are_alike(rho)
        return cls(
            block_diagonal([part.incoming for part in parts]),
            block_diagonal([part.outgoing for part in parts]),
            _slots(sizes).to(rho.device),
            rho,
            sizes,
            alike,
        )

    def __deepcopy__(self, memo: Any) -> Graphs:
        """Return a copy made with `clone`: torch copies sparse rows by nothing else."""
        return self._replace(**{name: getattr(self, name).clone() for name in self._fields[:4]})

    @property
    def nodes(self) -> int:
        """Return the number of nodes of all graphs together."""
        return self.incoming.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the adjacency."""
        return self.incoming.dtype

    def to(self, target: torch.device | torch.dtype) -> Graphs:
        """Return the graphs on a device, or with weights of a dtype; `rho` keeps its dtype."""
        if isinstance(target, torch.dtype):
            if target == self.dtype:
                return self
            incoming, outgoing = self.incoming.to(target), self.outgoing.to(target)
            return self._replace(incoming=incoming, outgoing=outgoing)
        moved = {name: getattr(self, name).to(target) for name in self._fields[:4]}
        return self._replace(**moved)

    def with_rho(self, rho: float) -> Graphs:
        """Return the graphs with one Perron root for all; published code takes the largest."""
        return self._replace(rho=torch.full_like(self.rho, _positive(rho)), alike=True)

    def propagate(self, x: Tensor) -> Tensor:
        """Return `A^T x` for (N, d), computed in the precision of the adjacency."""
        return multiply(Both(self.incoming, self.outgoing), x.to(self.dtype)).to(x.dtype)

    def pad(self, x: Tensor) -> Tensor:
        """Return (N, d) as (G, n_max, d): one sample per graph, padded with zeros."""
        graphs, most = len(self.sizes), max(self.sizes)
        if graphs * most == self.nodes:
            return x.reshape(graphs, most, x.shape[1])
        blank = x.new_zeros(graphs * most, x.shape[1])
        return blank.index_copy(0, self.slots, x).view(graphs, most, x.shape[1])

    def gather(self, z: Tensor) -> Tensor:
        """Return (G, n_max, d) as (N, d): the inverse of `pad`."""
        flat = z.reshape(-1, z.shape[-1])
        return flat if len(flat) == self.nodes else flat.index_select(0, self.slots)

    def pool(self, x: Tensor) -> Tensor:
        """Return the sums (G, d) of (N, d) over the nodes of each graph."""
        return self.pad(x).sum(dim=1)


def as_graphs(graph: Any) -> Graphs:
    """Return `Graphs`, a square sparse tensor, or PyG's `Data` and `Batch` as `Graphs`.

    The Perron roots are estimated at every call: convert once and keep the result. `edge_weight`
    of PyG's data counts, `edge_attr` does not. Data without `edge_index` may have an `adj_t`,
    the sparse tensor of $A^T$. `batch` says which graph each node belongs to.
    """
    if isinstance(graph, Graphs):
        return graph
    if isinstance(graph, Tensor):
        if graph.layout == torch.strided or graph.dim() != 2 or graph.shape[0] != graph.shape[1]:
            raise TypeError(
                f"an adjacency is a square sparse tensor, got {tuple(graph.shape)} {graph.layout}; "
                "call .to_sparse_csr() first"
            )
        edges = graph.to_sparse_coo().coalesce()
        return Graphs.from_edges(edges.indices(), graph.shape[0], edges.values())
    edge_index, weight = edges_of(graph)
    if edge_index is None:
        raise TypeError(
            "a graph comes as Graphs, as a sparse tensor, or as an object with num_nodes and "
            "edge_index, or adj_t as a sparse tensor of torch, like PyG's Data: got "
            f"{type(graph).__name__}"
        )
    nodes = int(graph.num_nodes)
    return Graphs.from_edges(edge_index, nodes, weight, sizes_in_batch(graph, nodes))


def edges_of(graph: Any) -> tuple[Tensor | None, Tensor | None]:
    """Return edges and weights of an object like PyG's `Data`; None for those it lacks."""
    edge_index, weight = getattr(graph, "edge_index", None), getattr(graph, "edge_weight", None)
    transposed = getattr(graph, "adj_t", None)
    if edge_index is None and isinstance(transposed, Tensor) and transposed.layout != torch.strided:
        edges = transposed.to_sparse_coo().coalesce()
        return edges.indices().flip(0), edges.values()
    return edge_index if isinstance(edge_index, Tensor) else None, weight


def normalised_edges(
    edge_index: Tensor, nodes: int, weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return edges and weights of $D^{-1/2} (A + I) D^{-1/2}$, with D the row sums of A + I."""
    loops = torch.arange(nodes, device=edge_index.device).expand(2, -1)
    edges = torch.cat((edge_index.long(), loops), dim=1)
    if weight is None:
        weight = torch.ones(edge_index.shape[1], device=edge_index.device)
    values = torch.cat((weight, weight.new_ones(nodes))).double()
    degree = values.new_zeros(nodes).index_add(0, edges[0], values)
    bad = torch.nonzero(~(degree > 0)).flatten().tolist()
    if bad:
        raise ValueError(
            f"the weights of node {bad[0]}, with 1 for its loop, add up to "
            f"{float(degree[bad[0]]):g}: edges can be normalised only where that is positive"
        )
    scale = degree.rsqrt()
    return edges, (scale[edges[0]] * values * scale[edges[1]]).to(weight.dtype)


def check_graph(
    edge_index: Tensor, nodes: int, weight: Tensor | None, sizes: Sequence[int]
) -> None:
    """Raise `ValueError` unless edges, weights and sizes of graphs fit together."""
    whole = not (edge_index.is_floating_point() or edge_index.dtype == torch.bool)
    if edge_index.dim() != 2 or edge_index.shape[0] != 2 or not whole:
        raise ValueError(
            f"edge_index must be (2, E) integers, got {tuple(edge_index.shape)} {edge_index.dtype}"
        )
    edges = edge_index.shape[1]
    if weight is not None and (weight.shape != (edges,) or not weight.is_floating_point()):
        raise ValueError(
            f"weight must be one floating-point number for each of {edges} edges, got "
            f"{tuple(weight.shape)} {weight.dtype}"
        )
    if weight is not None and weight.requires_grad:
        raise ValueError("weights of edges are constants and get no gradient: pass .detach()")
    if weight is not None and not bool(weight.isfinite().all()):
        raise ValueError("weights of edges must be finite, got NaN or infinity")
    if sum(sizes) != nodes or min(sizes, default=0) < 0 or not sizes:
        raise ValueError(f"the sizes of the graphs must add up to {nodes} nodes, got {sizes}")
    if edges and not 0 <= int(edge_index.min()) <= int(edge_index.max()) < nodes:
        raise ValueError(
            f"edges join nodes 0 to {nodes - 1}, got {int(edge_index.min())} to "
            f"{int(edge_index.max())}"
        )
    if edges and len(sizes) > 1:
        owner = torch.repeat_interleave(torch.tensor(sizes, device=edge_index.device))
        ends = owner[edge_index.long()]
        if not torch.equal(ends[0], ends[1]):
            raise ValueError("an edge joins two of the graphs: check the sizes and their order")


def sizes_in_batch(graph: Any, nodes: int) -> list[int] | None:
    """Return the nodes of each graph from `ptr` or `batch` of PyG's data; None without both."""
    ends, owner = getattr(graph, "ptr", None), getattr(graph, "batch", None)
    if ends is not None:
        return [b - a for a, b in pairwise(ends.tolist())]
    if owner is None:
        return None
    whole = not owner.is_floating_point() and owner.shape == (nodes,)
    if not whole or not bool((owner.diff() >= 0).all()) or bool((owner[:1] < 0).any()):
        raise ValueError(
            f"batch must give the graph of each of {nodes} nodes, counted from 0, in rising order, "
            f"got {tuple(owner.shape)} {owner.dtype}: sort the nodes by their graphs"
        )
    counts = torch.bincount(owner, minlength=int(getattr(graph, "num_graphs", None) or 1))
    sizes: list[int] = counts.tolist()
    return sizes


def _positive(rho: float) -> float:
    if not 0 < rho < inf:
        raise ValueError(f"a Perron root is positive and finite, got rho={rho}")
    return float(rho)


def _are_alike(rho: Tensor) -> bool:
    return bool((rho == rho[0]).all())


def _slots(sizes: tuple[int, ...]) -> Tensor:
    most = max(sizes)
    places = [torch.arange(size) + k * most for k, size in enumerate(sizes)]
    return torch.cat(places)
