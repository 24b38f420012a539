"""Fields for other programs: coordinates in, values out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from deq_zoo.exportable import Exportable
from deq_zoo.inr.model import DEQField, Field

_BEFORE = (
    "Coordinates of points, each from -1 to 1 along the signal with both ends included: (column, "
    "row) of an image, (time, row, column) of a video, (time,) of a sound, (x, y, z) of a shape."
)
_AFTER = (
    "Values of an image or a video are colours from -1 to 1: brightness is (value + 1) / 2, "
    "clipped to 0 and 1. Values of a sound are its samples; those of a shape are signed distances."
)


class Values(nn.Module):
    """A field that returns its values."""

    def __init__(self, field: Field) -> None:
        super().__init__()
        self.field = field

    def forward(self, points: Tensor) -> dict[str, Tensor]:
        return {"values": self.field(points).prediction}


def make_export(field: Field, facts: Mapping[str, Any]) -> Exportable:
    """Return a field as other programs call it, for any number of points."""
    points = 2 * torch.rand(2, field.d, generator=torch.Generator().manual_seed(0)) - 1
    return Exportable(
        Values(field),
        {"points": points},
        {"points": "coordinates", "values": "of the field at the points"},
        _BEFORE,
        _AFTER,
        facts,
        solves=isinstance(field, DEQField),
    )
