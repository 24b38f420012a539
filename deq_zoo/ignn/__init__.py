"""IGNN: implicit graph networks (Gu et al., 2020)."""

from typing import TYPE_CHECKING

from deq_zoo.lazy import lazy_names

if TYPE_CHECKING:
    from deq_zoo.ignn.constraint import WellPosedness, project_rows
    from deq_zoo.ignn.graph import Graphs, as_graphs, normalised_edges
    from deq_zoo.ignn.layers import ImplicitGraph
    from deq_zoo.ignn.model import GraphIGNN, IGNNConfig, NodeIGNN, Output, SkipIGNN
    from deq_zoo.ignn.sparse import perron_roots

__all__ = [
    "GraphIGNN",
    "Graphs",
    "IGNNConfig",
    "ImplicitGraph",
    "NodeIGNN",
    "Output",
    "SkipIGNN",
    "WellPosedness",
    "as_graphs",
    "normalised_edges",
    "perron_roots",
    "project_rows",
]

__getattr__ = lazy_names(
    __name__,
    {
        "GraphIGNN": "model",
        "Graphs": "graph",
        "IGNNConfig": "model",
        "ImplicitGraph": "layers",
        "NodeIGNN": "model",
        "Output": "model",
        "SkipIGNN": "model",
        "WellPosedness": "constraint",
        "as_graphs": "graph",
        "normalised_edges": "graph",
        "perron_roots": "sparse",
        "project_rows": "constraint",
    },
)
