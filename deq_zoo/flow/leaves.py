"""Textures of leaves that cover each other, with edges at all scales as photographs have them."""

from __future__ import annotations

from math import pi

import torch
import torch.nn.functional as F
from torch import Tensor

from deq_zoo.task import generator

LEAVES = 8  # textures of a split
_SIDE, _COUNT = 384, 800
_SMALLEST, _LARGEST = 4.0, 90.0  # radii, pixels


def dead_leaves(split: str, number: int) -> Tensor:
    """Return a texture (3, 384, 384), floats from 0 to 255: the dead-leaves model.

    Leaves are superellipses of random colours whose radii r have a density of 1 / r^3, which makes
    the statistics of the texture those of photographs at all scales. Each leaf has a texture of its
    own, smooth noise at a random scale.
    """
    rng = generator("leaves", split, number)
    image = _colour(rng) + _noise(4, rng) + _noise(48, rng)
    y, x = torch.meshgrid(torch.arange(_SIDE), torch.arange(_SIDE), indexing="ij")
    noises = [_noise(cells, rng) for cells in (12, 32, 96, 192)]
    u = torch.rand(_COUNT, 8, generator=rng)
    radii = (_SMALLEST**-2 + u[:, 0] * (_LARGEST**-2 - _SMALLEST**-2)) ** -0.5
    for k in radii.argsort(descending=True).tolist() if number % 2 else range(_COUNT):
        colour = _colour(rng)
        _paint(image, x, y, float(radii[k]), u[k].tolist(), colour, noises)
    return image.clamp(0, 255)


def _paint(
    image: Tensor,
    x: Tensor,
    y: Tensor,
    radius: float,
    u: list[float],
    colour: Tensor,
    noises: list[Tensor],
) -> None:
    """Paint one leaf over an image, in place."""
    cx, cy, ratio, angle = u[1] * _SIDE, u[2] * _SIDE, 2 ** (u[3] - 0.5), torch.tensor(u[4] * pi)
    reach = int(2 * radius) + 2
    rows = slice(max(0, int(cy) - reach), int(cy) + reach)
    columns = slice(max(0, int(cx) - reach), int(cx) + reach)
    dx, dy = x[rows, columns] - cx, y[rows, columns] - cy
    a = (angle.cos() * dx + angle.sin() * dy) / (radius * ratio)
    b = (angle.cos() * dy - angle.sin() * dx) / (radius / ratio)
    power = (1.0, 2.0, 2.0, 6.0)[int(4 * u[5])]
    alpha = (0.5 + (1 - a.abs() ** power - b.abs() ** power) * radius / power).clamp(0, 1)
    noise = noises[int(len(noises) * u[6])][:, rows, columns]
    leaf = colour + 1.5 * u[7] * noise
    image[:, rows, columns] = torch.lerp(image[:, rows, columns], leaf, alpha)


def _colour(rng: torch.Generator) -> Tensor:
    """Return a colour (3, 1, 1) that is rarely as vivid as paint."""
    grey, tint = torch.rand(1, generator=rng), torch.randn(3, generator=rng)
    return (255 * grey + 40 * tint)[:, None, None].clamp(0, 255)


def _noise(cells: int, rng: torch.Generator) -> Tensor:
    """Return smooth noise (3, 384, 384) with a deviation of about 30 grey levels, nearly grey."""
    grey = torch.randn(1, 1, cells, cells, generator=rng)
    tint = 0.4 * torch.randn(1, 3, cells, cells, generator=rng)
    return 30 * F.interpolate(grey + tint, size=(_SIDE, _SIDE), mode="bicubic")[0]
