"""MDEQ for other programs: normalised images in, logits out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from deq_zoo.errors import ZooError
from deq_zoo.exportable import Exportable
from deq_zoo.mdeq.model import MDEQClassifier

_BEFORE = (
    "Resize an image to facts.side x facts.side (with facts.crop: resize its shorter side to "
    "facts.side * 256 / 224, and take the square in the middle). Divide bytes by 255, subtract "
    "facts.mean and divide by facts.std, channel by channel; a model of one channel takes the mean "
    "over colours. If facts.ground is dark, exchange light and dark of a drawing on a light ground."
)
_AFTER = "Softmax over the last dimension gives the probabilities of facts.classes."


class Logits(nn.Module):
    """A classifier that returns its logits."""

    def __init__(self, model: MDEQClassifier) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return {"logits": self.model(images).prediction}


def make_export(model: MDEQClassifier, facts: Mapping[str, Any]) -> Exportable:
    """Return a classifier as other programs call it."""
    if "side" not in facts:
        raise ZooError("the checkpoint does not say the size of its images: train or convert again")
    side, channels = int(facts["side"]), model.config.in_channels
    plain = model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    return Exportable(
        Logits(plain),
        {"images": torch.rand(2, channels, side, side, generator=torch.Generator().manual_seed(0))},
        {"images": "normalised images", "logits": "of the classes"},
        _BEFORE,
        _AFTER,
        facts,
    )
