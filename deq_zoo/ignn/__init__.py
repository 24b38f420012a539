"""IGNN: implicit graph networks (Gu et al., 2020)."""

from typing import TYPE_CHECKING

from deq_zoo.lazy import lazy_names

if TYPE_CHECKING:
    from deq_zoo.ignn.constraint import WellPosedness, project_rows
    from deq_zoo.ignn.graph import Graphs, as_graphs, normalised_edges
    from deq_zoo.ignn.layers import ImplicitGraph
    from deq_zoo.ignn.model import IGNN, GraphIGNN, GraphOutput, IGNNConfig, NodeIGNN, SkipIGNN
    from deq_zoo.ignn.prediction import Classes, LabelSets
    from deq_zoo.ignn.sparse import perron_roots

__all__ = [
    "IGNN",
    "Classes",
    "GraphIGNN",
    "GraphOutput",
    "Graphs",
    "IGNNConfig",
    "ImplicitGraph",
    "LabelSets",
    "NodeIGNN",
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
        "Classes": "prediction",
        "GraphIGNN": "model",
        "GraphOutput": "model",
        "Graphs": "graph",
        "IGNN": "model",
        "IGNNConfig": "model",
        "ImplicitGraph": "layers",
        "LabelSets": "prediction",
        "NodeIGNN": "model",
        "SkipIGNN": "model",
        "WellPosedness": "constraint",
        "as_graphs": "graph",
        "normalised_edges": "graph",
        "perron_roots": "sparse",
        "project_rows": "constraint",
    },
)
