"""Optical flow for a server: every pair of images is a solve of its own."""

from __future__ import annotations

import base64
from typing import Any

from deq_zoo.errors import ZooError
from deq_zoo.flow.colours import flow_to_colour
from deq_zoo.flow.formats import flo_bytes
from deq_zoo.flow.model import DEQFlow
from deq_zoo.model import Model
from deq_zoo.serving.service import Field, Service, Values, describe_stats, png_text


class PairFlow(Service[DEQFlow]):
    """The flow from one image to another of the same size."""

    fields = (
        Field("image1", "image", "the first frame"),
        Field("image2", "image", "the second frame"),
    )

    def answer(self, values: Values) -> dict[str, Any]:
        found = self.model.predict((values["image1"], values["image2"]))
        flow = found.prediction
        motion = float(flow.square().sum(0).sqrt().mean())
        return {
            "prediction": f"mean motion {motion:.2f} px",
            "mean_motion_px": motion,
            "change_px": found.change,
            "flow_png": png_text(flow_to_colour(flow)),
            "flow_flo": base64.b64encode(flo_bytes(flow)).decode(),
            **describe_stats(found.stats),
            "settled": found.settled,
        }


def make_service(model: Model) -> PairFlow:
    """Return the service of a flow model."""
    if not isinstance(model, DEQFlow):
        raise ZooError(f"{type(model).__name__} cannot be served")
    return PairFlow(model)
