"""Values of a signal for a server: the points of a request are solved together."""

from __future__ import annotations

from typing import Any

import torch

from deq_zoo.errors import ZooError
from deq_zoo.inr.model import Field as SignalField
from deq_zoo.inr.representation import Representation
from deq_zoo.model import Model
from deq_zoo.serving.service import Field, Service, Values, describe_stats


class PointValues(Service[SignalField | Representation]):
    """The values of a signal at points."""

    fields = (Field("points", "numbers", "coordinates from -1 to 1, a list for each point"),)

    def answer(self, values: Values) -> dict[str, Any]:
        field = self.model.field if isinstance(self.model, Representation) else self.model
        points = torch.tensor(values["points"], dtype=torch.float64)
        if points.dim() != 2 or points.shape[1] != field.d or not len(points):
            raise ZooError(
                f"points are lists of {field.d} coordinates, got shape {tuple(points.shape)}"
            )
        found = self.model.predict(points)
        return {
            "prediction": f"values at {len(points)} points",
            "values": found.prediction.tolist(),
            **describe_stats(found.stats),
        }


def make_service(model: Model) -> PointValues:
    """Return the service of a signal."""
    if not isinstance(model, (SignalField, Representation)):
        raise ZooError(f"{type(model).__name__} cannot be served")
    return PointValues(model)
