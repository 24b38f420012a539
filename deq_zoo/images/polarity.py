"""Light ink on a dark ground or dark ink on a light one: which of them an image shows."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Ground = Literal["dark", "light"]
_GREY = 127.5


def ground_of(image: Tensor) -> Ground | None:
    """Return whether the ground of a drawing is dark or light, by its border; None if unclear.

    The border of a drawing is ground, for the most part; ink is what differs from it. Light that
    falls off evenly to one side is no difference. An image whose border has every brightness, such
    as a photograph, has no ground.

    Args:
        image: (C, H, W) bytes.
    """
    grey = image.double().mean(0)
    apart = grey - _light(grey)
    border = _border(apart)
    ground = border.median()
    if (border - ground).abs().mean() > _GREY / 4:
        return None
    ink = (apart - ground).flatten()[(apart - ground).abs().flatten().argmax()]
    if abs(ink) < _GREY / 4:  # nothing is drawn
        return None
    return "light" if ink < 0 else "dark"


def _light(grey: Tensor) -> Tensor:
    """Return the plane that is nearest to the border of an image (H, W), at every pixel."""
    height, width = grey.shape
    down, across = (torch.linspace(-1, 1, n, dtype=grey.dtype) for n in (height, width))
    places = torch.stack([torch.ones_like(grey), *torch.meshgrid(down, across, indexing="ij")])
    basis = torch.stack([_border(each) for each in places], dim=1)  # (n, 3)
    # Least squares of smallest norm: a border of one pixel fits more than one plane.
    weights = torch.linalg.pinv(basis) @ _border(grey)
    plane: Tensor = (weights[:, None, None] * places).sum(0)
    return plane


def _border(grey: Tensor) -> Tensor:
    return torch.cat((grey[0], grey[-1], grey[1:-1, 0], grey[1:-1, -1]))


def has_other_ground(image: Tensor, ground: Ground) -> bool:
    """Return whether the ground of a drawing is clear, and not the expected one."""
    return ground_of(image) not in (None, ground)


def with_ground(images: Tensor, ground: Ground) -> Tensor:
    """Return drawings with light and dark exchanged in those that have the other ground.

    Args:
        images: (B, C, H, W) bytes.
        ground: the expected one.
    """
    other = torch.tensor([has_other_ground(image, ground) for image in images], dtype=torch.bool)
    return torch.where(other[:, None, None, None], 255 - images, images)
