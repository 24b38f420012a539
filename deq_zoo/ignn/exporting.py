"""IGNN on one graph for other programs: features of its nodes in, logits out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deq_zoo.errors import ZooError
from deq_zoo.exportable import Exportable
from deq_zoo.ignn.graph import Graphs
from deq_zoo.ignn.model import IGNN

_BEFORE = (
    "`features` has one row for each of the facts.nodes nodes of the graph that the file was made "
    "for, in its order, with facts.features numbers each; with facts.unit_rows, divide each row by "
    "its sum. The graph is part of the file: another graph needs another export."
)
_AFTER = (
    "Softmax over the last dimension gives the probabilities of facts.classes; with "
    "facts.multilabel, take the sigmoid of each logit instead."
)


@dataclass(frozen=True)
class GraphFile:
    """The options of an export.

    Args:
        graph: an `.npz` file with the graph, as for `predict`; none takes the graph of the
            training data, or the first one of the test data.
    """

    graph: str = ""


class EdgeList(Graphs):
    """Graphs whose products are sums over edges: other runtimes have no sparse rows.

    `incoming` are the weights (E, 1) of the edges, `outgoing` their targets and sources (2, E).
    """

    @property
    def sparse(self) -> bool:
        """Return False: not even a sparse W is used."""
        return False

    def propagate(self, x: Tensor) -> Tensor:
        """Return `A^T x` for (N, d)."""
        target, source = self.outgoing.unbind(0)
        messages = x.index_select(0, source) * self.incoming
        places = target[:, None].expand_as(messages)
        return torch.zeros_like(x).scatter_add(0, places, messages)

    @property
    def nodes(self) -> int:
        """Return the number of nodes of all graphs together."""
        return sum(self.sizes)


def as_edge_list(graph: Graphs) -> EdgeList:
    """Return graphs with the targets, sources and weights of their edges."""
    edges = graph.incoming.to_sparse_coo().coalesce()
    weights, ends = edges.values()[:, None].clone(), edges.indices().long().clone()
    return EdgeList(weights, ends, graph.slots, graph.rho, graph.sizes, graph.alike)


class OnGraph(nn.Module):
    """A network on one graph, which is part of it."""

    def __init__(self, model: IGNN, graph: Graphs) -> None:
        super().__init__()
        dtype = next(model.parameters()).dtype
        self.model, self._graph = model, as_edge_list(graph.to(dtype))

    def forward(self, features: Tensor) -> dict[str, Tensor]:
        return {"logits": self.model(features, self._graph).prediction}


def make_export(
    model: IGNN, x: Tensor | None, graph: Graphs, facts: Mapping[str, Any]
) -> Exportable:
    """Return a network on one graph as other programs call it.

    Args:
        model: the network.
        x: (N, features) of the nodes.
        graph: the graph, or several side by side.
        facts: of the checkpoint.
    """
    if x is None:
        raise ZooError(
            "every node of this graph is its own feature, so that its answer is a constant: there "
            "is nothing to export; deq-zoo predict computes it"
        )
    return Exportable(
        OnGraph(model, graph),
        {"features": x.to(next(model.parameters()).dtype)},
        {"features": "of the nodes", "logits": "of the classes"},
        _BEFORE,
        _AFTER,
        {**facts, "nodes": graph.nodes, "graphs": list(graph.sizes)},
        open_batch=False,
    )
