r"""Correlation of every place of one frame with windows of the other, at four scales.

$$V_l[p, u] = \langle F_1[p], \mathrm{pool}^l(F_2)[u] \rangle / \sqrt{D}$$

Pooling the volume equals pooling the features of the second frame. `correlate` pools features, so
that all scales lie side by side in one matrix. All points of a window have one fractional position:
a lookup gathers 10 x 10 values and blends them along x, then along y. Sampling each of the 9 x 9
points by itself would read four times 81 values.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchdeq import mem_gc

LEVELS, RADIUS = 4, 4
PLANES = LEVELS * (2 * RADIUS + 1) ** 2
SMALLEST = 2 ** (LEVELS - 1)  # sides of a grid whose coarsest level has one place
Storage = Literal["auto", "volume", "on_demand"]

_ON_DEMAND = 1 << 20  # correlations in memory at a time, on demand
_LARGEST = 1 << 28  # volume that `auto` keeps: 1 GiB in single precision, four pairs of Sintel


class Correlation(NamedTuple):
    """A lookup in the correlations of a pair of feature maps; see `correlate`."""

    query: Tensor  # (N, hw, D), scaled
    keys: Tensor  # (N, D, S): all levels side by side
    volume: Tensor | None  # (N, hw, S)
    levels: Tensor  # (3, 4): where each level begins, its height and its width

    def __call__(self, coords: Tensor) -> Tensor:
        """Return windows (N, 324, h, w) around coordinates (N, 2, h, w).

        Channel `81 l + 9 a + b` is level l at `(x / 2^l + a - 4, y / 2^l + b - 4)`, zero
        outside the image.
        """
        N, _, h, w = coords.shape
        c = coords.flatten(2).mT.to(self.query.dtype)  # (N, hw, 2)
        with torch.autocast(coords.device.type, enabled=False):
            if self.volume is not None:
                windows = self._windows(self.volume, c)
            else:
                rows = max(1, _ON_DEMAND // self.keys.shape[2])
                parts = zip(self.query.split(rows, dim=1), c.split(rows, dim=1), strict=True)
                windows = torch.cat([mem_gc(self._on_demand, part) for part in parts], dim=1)
        return windows.mT.reshape(N, PLANES, h, w)

    def _on_demand(self, query: Tensor, c: Tensor) -> Tensor:
        return self._windows(query @ self.keys, c)

    def _windows(self, volume: Tensor, c: Tensor) -> Tensor:
        """Return windows (N, n, 324) of correlations (N, n, S) around (N, n, 2)."""
        N, n, _ = c.shape
        wide = torch.arange(2 * RADIUS + 2, device=c.device) - RADIUS
        scale = 0.5 ** torch.arange(LEVELS, device=c.device, dtype=c.dtype)
        first, height, width = self.levels
        ix, lower_x, upper_x = _axis(c[..., 0, None] * scale, wide, width)
        iy, lower_y, upper_y = _axis(c[..., 1, None] * scale, wide, height)
        column = first[:, None] + ix  # (N, n, 4, 10)
        place = column[..., None] + (iy * width[:, None])[..., None, :]  # (N, n, 4, 10, 10)
        v = volume.gather(2, place.flatten(2)).view(place.shape)
        v = torch.addcmul(v[..., :-1, :] * lower_x[..., None], v[..., 1:, :], upper_x[..., None])
        v = torch.addcmul(v[..., :-1] * lower_y[..., None, :], v[..., 1:], upper_y[..., None, :])
        return v.reshape(N, n, PLANES)


def _axis(c: Tensor, wide: Tensor, size: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ten places around each coordinate (..., 4), and the weights of nine pairs of them."""
    floor = c.detach().floor()
    # Far outside all values are zero. The bound keeps integers small and removes NaN.
    at = floor.nan_to_num(-1e6).clamp(-1e6, 1e6).long()[..., None] + wide  # (..., 4, 10)
    last = size[:, None] - 1
    inside = ((at >= 0) & (at <= last)).to(c.dtype)
    part = (c - floor)[..., None]
    return at.clamp_min(0).minimum(last), (1 - part) * inside[..., :-1], part * inside[..., 1:]


def correlate(fmap1: Tensor, fmap2: Tensor, storage: Storage = "auto") -> Correlation:
    """Return the correlations of two feature maps (N, D, h, w).

    Args:
        fmap1: features to look from.
        fmap2: features to look at.
        storage: `volume` computes all correlations once and keeps (hw)² · 4/3 numbers of each
            pair; `on_demand` computes them at every lookup, some rows at a time, and keeps none;
            `auto` keeps a volume of up to 1 GiB.
    """
    h, w = fmap1.shape[2:]
    if min(h, w) < SMALLEST:
        raise ValueError(
            f"features must be at least {SMALLEST} x {SMALLEST}, got {h} x {w}: pad the images to "
            f"{8 * SMALLEST} pixels"
        )
    exact = torch.promote_types(fmap1.dtype, torch.float32)
    with torch.autocast(fmap1.device.type, enabled=False):
        levels = [fmap2.to(exact)]
        for _ in range(LEVELS - 1):
            levels.append(F.avg_pool2d(levels[-1], 2))
        sizes = torch.tensor([level.shape[2:] for level in levels], device=fmap1.device).mT
        area = sizes.prod(0)
        keys = torch.cat([level.flatten(2) for level in levels], dim=2)
        query = fmap1.to(exact).flatten(2).mT / fmap1.shape[1] ** 0.5
        small = len(query) * query.shape[1] * keys.shape[2] <= _LARGEST
        keep = storage == "volume" or (storage == "auto" and small)
        volume = query @ keys if keep else None
    return Correlation(query, keys, volume, torch.stack((area.cumsum(0) - area, *sizes)))
