"""Facts about graphs that a network was trained on: what using it on other graphs needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from deq_zoo.errors import ZooError


@dataclass(frozen=True, kw_only=True)
class GraphFacts:
    """The form of the training graphs; saved in checkpoints by `Task.facts`.

    Args:
        features: numbers for each node.
        classes: names of the classes, or of the labels if there are several for each node.
        multilabel: whether a node has any number of labels instead of one class.
        undirected: whether edges go both ways, without loops and without repetition.
        normalised: whether loops are added and the adjacency becomes $D^{-1/2} (A + I) D^{-1/2}$.
        rho: the Perron root that training took for every graph; None estimates that of each.
        unit_rows: whether the features of every node are divided by their sum.
        identity: whether every node is its own feature, so that there are no features to give.
    """

    features: int
    classes: tuple[str, ...]
    multilabel: bool = False
    undirected: bool = True
    normalised: bool = True
    rho: float | None = None
    unit_rows: bool = False
    identity: bool = False

    def to_data(self) -> dict[str, Any]:
        """Return the facts as plain values."""
        return {**asdict(self), "classes": list(self.classes)}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> GraphFacts:
        """Return the facts that `to_data` wrote; raise `ZooError` if there are none."""
        if "features" not in data or "classes" not in data:
            raise ZooError(
                "the model does not know the form of its graphs: call it with features and a "
                "Graphs, or load it from a checkpoint by deq_zoo.load(checkpoint, data_dir=FOLDER)"
            )
        named = {f.name: data[f.name] for f in fields(cls) if f.name in data}
        return cls(**{**named, "classes": tuple(named["classes"])})


def numbered(count: int) -> tuple[str, ...]:
    """Return the names of classes that have none: their numbers."""
    return tuple(str(k) for k in range(count))
