"""Signed distances of shapes: negative inside, with a gradient of length 1."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from deq_zoo.errors import DataError
from deq_zoo.inr.readers import read_image

Name = Literal["disc", "box", "sphere", "torus", "silhouette"]
DIMENSIONS: dict[str, int] = {"disc": 2, "box": 2, "sphere": 3, "torus": 3, "silhouette": 2}
Distance = Callable[[Tensor], Tensor]


def distance(name: Name, file: str | None = None) -> Distance:
    """Return the signed distance of a shape, a function of points (N, d) to (N,).

    Args:
        name: disc (radius 0.6), box (half sides 0.6 and 0.4), sphere (radius 0.6), torus (radii
            0.6 and 0.25), or silhouette, the dark part of an image.
        file: the image of a silhouette.
    """
    if name == "silhouette":
        if file is None:
            raise DataError("a silhouette needs an image, and file is None: give --set file=PATH")
        return silhouette(read_image(Path(file).expanduser(), channels=1)[..., 0] < 128)
    return {"disc": _ball, "sphere": _ball, "box": _box, "torus": _torus}[name]


def _ball(x: Tensor) -> Tensor:
    radius: Tensor = x.norm(dim=1)
    return radius - 0.6


def _box(x: Tensor) -> Tensor:
    gap = x.abs() - x.new_tensor((0.6, 0.4))
    outside: Tensor = gap.clamp_min(0).norm(dim=1)
    return outside + gap.amax(1).clamp_max(0)


def _torus(x: Tensor) -> Tensor:
    ring = torch.hypot(x[:, 0], x[:, 1]) - 0.6
    return torch.hypot(ring, x[:, 2]) - 0.25


def silhouette(inside: Tensor) -> Distance:
    """Return the signed distance of a mask (H, W), exact at the centres of its pixels.

    Between the centres it is interpolated. The longer side of the mask spans -1 to 1.
    """
    from scipy.ndimage import distance_transform_edt

    mask = inside.cpu().numpy()
    if mask.all() or not mask.any():
        raise DataError(
            "a silhouette needs pixels inside and outside, dark and light: got one of them alone"
        )
    pixels = torch.from_numpy(distance_transform_edt(~mask) - distance_transform_edt(mask))
    height, width = mask.shape
    longest = max(height, width) - 1
    field = pixels.float()[None, None] * (2 / longest)

    def interpolate(x: Tensor) -> Tensor:
        spread = x.new_tensor((longest / max(1, width - 1), longest / max(1, height - 1)))
        places = (x * spread)[None, None]  # (1, 1, N, 2): column, row
        distances = torch.nn.functional.grid_sample(
            field.to(x), places, padding_mode="border", align_corners=True
        )
        return distances.flatten()

    return interpolate
