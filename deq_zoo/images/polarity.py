"""Light ink on a dark ground or dark ink on a light one: which of them an image shows."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Ground = Literal["dark", "light"]
_GREY = 127.5


def ground_of(image: Tensor) -> Ground | None:
    """Return whether the ground of a drawing is dark or light, by its border; None if unclear.

    The border of a drawing is ground, for the most part; ink is what differs from it. An image
    whose border has every brightness, such as a photograph, has no ground.

    Args:
        image: (C, H, W) bytes.
    """
    grey = image.double().mean(0)
    border = torch.cat((grey[0], grey[-1], grey[1:-1, 0], grey[1:-1, -1]))
    ground = border.median()
    if (border - ground).abs().mean() > _GREY / 4:
        return None
    ink = grey.flatten()[(grey - ground).abs().flatten().argmax()]
    if abs(ink - ground) < _GREY / 4:  # nothing is drawn
        return None
    return "light" if ground > ink else "dark"
