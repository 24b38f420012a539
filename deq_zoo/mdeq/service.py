"""Classification of images for a server: every image is a row of a stream."""

from __future__ import annotations

from typing import Any

import torch

from deq_zoo.errors import ZooError
from deq_zoo.mdeq.model import MDEQClassifier
from deq_zoo.mdeq.prediction import Classes, prepare
from deq_zoo.model import Model
from deq_zoo.serving.limits import Limits
from deq_zoo.serving.service import (
    Field,
    Prepared,
    Service,
    Values,
    describe_result,
    describe_stats,
)
from deq_zoo.streaming import can_stream, open_stream
from torchdeq import reset_norm
from torchdeq.stream import Request, Result, Stream


class ImageClasses(Service[MDEQClassifier]):
    """The classes of one image."""

    fields = (Field("image", "image", "the picture to classify"),)

    def __init__(self, model: MDEQClassifier) -> None:
        super().__init__(model)
        prepare(torch.zeros(3, 8, 8, dtype=torch.uint8), model.facts)  # raises without facts
        with torch.no_grad():
            reset_norm(model.full_stage)  # once: the weights stay as they are

    def open_stream(self, limits: Limits) -> Stream | None:
        deq, f = self.model.deq, self.model.full_stage
        places = limits.slots + limits.queue
        return open_stream(deq, f, limits.slots, ahead=places) if can_stream(deq) else None

    def answer(self, values: Values) -> dict[str, Any]:
        found = self.model.predict(values["image"])
        return _describe(found.prediction) | describe_stats(found.stats)

    def prepare(self, values: Values) -> Prepared:
        image = prepare(values["image"], self.model.facts)
        u = self.model.inject(image.pixels.to(self.model.device))
        start = [branch[0] for branch in self.model.start(u)]
        return Prepared(Request(start, (u[0],)), image)

    def finish(self, result: Result, context: Any) -> dict[str, Any]:
        logits = self.model.classify([branch[None] for branch in result.z])
        chance = logits.float().softmax(1)[0]
        classes = Classes.of(
            chance, self.model.facts.get("classes"), context.inverted, context.drawn
        )
        return _describe(classes) | describe_result(result)


def make_service(model: Model) -> ImageClasses:
    """Return the service of a classifier."""
    if not isinstance(model, MDEQClassifier):
        raise ZooError(f"{type(model).__name__} cannot be served: only classifiers can")
    return ImageClasses(model)


def _describe(classes: Classes) -> dict[str, Any]:
    return {
        "prediction": classes.label,
        "probability": classes.probability,
        "probabilities": dict(classes.probabilities),
        "inverted": classes.inverted,
        "drawn": classes.drawn,
    }
