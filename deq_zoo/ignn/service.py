"""Classes of graphs for a server: every graph has a shape, and so a solve, of its own."""

from __future__ import annotations

from typing import Any

from deq_zoo.errors import ZooError
from deq_zoo.ignn.model import IGNN
from deq_zoo.model import Model
from deq_zoo.serving.service import Field, Service, Values, describe_stats


class GraphClasses(Service[IGNN]):
    """The classes of a graph, or of its nodes."""

    # Without `x` and with `batch`, a few numbers could ask for memory without end.
    fields = (
        Field("edge_index", "numbers", "[[sources], [targets]]"),
        Field("x", "numbers", "a row of features for each node"),
        Field("edge_weight", "numbers", "a weight for each edge", optional=True),
    )

    def answer(self, values: Values) -> dict[str, Any]:
        found = self.model.predict(dict(values))
        rows = found.prediction
        return {
            "prediction": rows.summary(),
            **rows.to_data(),
            "names": list(rows.names),
            "row_probabilities": rows.probabilities.tolist(),
            **describe_stats(found.stats),
        }


def make_service(model: Model) -> GraphClasses:
    """Return the service of a graph network."""
    if not isinstance(model, IGNN):
        raise ZooError(f"{type(model).__name__} cannot be served")
    return GraphClasses(model)
