r"""Correlation of every place of one frame with windows of the other, at several scales.

$$V_l[p, u] = \langle F_1[p], \mathrm{pool}^l(F_2)[u] \rangle / \sqrt{D}$$

Pooling the volume equals pooling the features of the second frame. `correlate` pools features, so
that all scales lie side by side in one matrix. All points of a window have one fractional position:
with radius 4, a lookup gathers 10 x 10 values and blends them along x, then along y. Sampling each
of the 9 x 9 points by itself would read four times 81 values.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchdeq import mem_gc

LEVELS, RADIUS = 4, 4  # as published, and the most levels of any size
SMALLEST = 2 ** (LEVELS - 1)  # sides of a grid whose coarsest level has one place
Storage = Literal["auto", "volume", "on_demand"]

_ON_DEMAND = 1 << 20  # correlations in memory at a time, on demand
_LARGEST = 1 << 28  # volume that `auto` keeps: 1 GiB in single precision, four pairs of Sintel


class Correlation(NamedTuple):
    """A lookup in the correlations of a pair of feature maps; see `correlate`."""

    query: Tensor  # (N, hw, D), scaled
    keys: Tensor  # (N, D, S): all levels side by side
    volume: Tensor | None  # (N, hw, S)
    levels: Tensor  # (3, L): where each level begins, its height and its width
    radius: int = RADIUS

    def __call__(self, coords: Tensor) -> Tensor:
        """Return windows (N, planes, h, w) around coordinates (N, 2, h, w).

        With radius r and n = 2 r + 1, channel `n^2 l + n a + b` is level l at
        `(x / 2^l + a - r, y / 2^l + b - r)`, zero outside the image.
        """
        h, w = coords.shape[2:]
        c = coords.flatten(2).mT.to(self.query.dtype)  # (N, hw, 2)
        with torch.autocast(coords.device.type, enabled=False):
            if self.volume is not None:
                windows = self._windows(self.volume, c)
            else:
                rows = max(1, _ON_DEMAND // self.keys.shape[2])
                parts = zip(self.query.split(rows, dim=1), c.split(rows, dim=1), strict=True)
                windows = torch.cat([mem_gc(self._on_demand, part) for part in parts], dim=1)
        looked_up: Tensor = windows.mT.unflatten(2, (h, w))
        return looked_up

    def _on_demand(self, query: Tensor, c: Tensor) -> Tensor:
        return self._windows(query @ self.keys, c)

    def _windows(self, volume: Tensor, c: Tensor) -> Tensor:
        """Return windows (N, n, planes) of correlations (N, n, S) around (N, n, 2)."""
        wide = torch.arange(2 * self.radius + 2, device=c.device) - self.radius
        scale = 0.5 ** torch.arange(self.levels.shape[1], device=c.device, dtype=c.dtype)
        first, height, width = self.levels.unbind(0)
        ix, lower_x, upper_x = _axis(c[..., 0, None] * scale, wide, width)
        iy, lower_y, upper_y = _axis(c[..., 1, None] * scale, wide, height)
        column = first[:, None] + ix  # (N, n, L, 2 r + 2)
        place = column[..., None] + (iy * width[:, None])[..., None, :]  # (N, n, L, ., .)
        v = volume.gather(2, place.flatten(2)).view(place.shape)
        v = torch.addcmul(v[..., :-1, :] * lower_x[..., None], v[..., 1:, :], upper_x[..., None])
        v = torch.addcmul(v[..., :-1] * lower_y[..., None, :], v[..., 1:], upper_y[..., None, :])
        return v.flatten(2)


def _axis(c: Tensor, wide: Tensor, size: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return places around each coordinate (..., L), and the weights of all pairs of neighbours."""
    floor = c.detach().floor()
    # Far outside all values are zero. The bound keeps integers small and removes NaN.
    at = floor.nan_to_num(-1e6).clamp(-1e6, 1e6).long()[..., None] + wide  # (..., L, 2 r + 2)
    last = size[:, None] - 1
    inside = ((at >= 0) & (at <= last)).to(c.dtype)
    part = (c - floor)[..., None]
    return at.clamp_min(0).minimum(last), (1 - part) * inside[..., :-1], part * inside[..., 1:]


def planes(levels: int, radius: int) -> int:
    """Return the channels of a lookup."""
    return levels * (2 * radius + 1) ** 2


def correlate(
    fmap1: Tensor,
    fmap2: Tensor,
    storage: Storage = "auto",
    levels: int = LEVELS,
    radius: int = RADIUS,
) -> Correlation:
    """Return the correlations of two feature maps (N, D, h, w).

    Args:
        fmap1: features to look from.
        fmap2: features to look at.
        storage: `volume` computes all correlations once and keeps (hw)² · 4/3 numbers of each
            pair; `on_demand` computes them at every lookup, some rows at a time, and keeps none;
            `auto` keeps a volume of up to 1 GiB.
        levels: scales of the second frame.
        radius: places on each side of a window's centre, at every scale.
    """
    h, w = fmap1.shape[2:]
    if min(h, w) < SMALLEST:
        raise ValueError(
            f"features must be at least {SMALLEST} x {SMALLEST}, got {h} x {w}: pad the images to "
            f"{8 * SMALLEST} pixels"
        )
    exact = torch.promote_types(fmap1.dtype, torch.float32)
    with torch.autocast(fmap1.device.type, enabled=False):
        pyramid = [fmap2.to(exact)]
        for _ in range(levels - 1):
            pyramid.append(F.avg_pool2d(pyramid[-1], 2))
        sizes = torch.tensor([level.shape[2:] for level in pyramid], device=fmap1.device).mT
        area = sizes.prod(0)
        keys = torch.cat([level.flatten(2) for level in pyramid], dim=2)
        query = fmap1.to(exact).flatten(2).mT / fmap1.shape[1] ** 0.5
        small = query.shape[0] * query.shape[1] * keys.shape[2] <= _LARGEST
        keep = storage == "volume" or (storage == "auto" and small)
        volume = query @ keys if keep else None
    return Correlation(query, keys, volume, torch.stack((area.cumsum(0) - area, *sizes)), radius)
