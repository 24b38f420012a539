"""Augmentation of training pairs: colours, erased boxes, scale, flips, a crop.

All randomness comes from the generators that callers pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Pair(NamedTuple):
    """Two frames (3, H, W), the true flow (2, H, W) between them and where it is valid.

    Frames are bytes, or floats from 0 to 255 with noise.
    """

    image1: Tensor
    image2: Tensor
    flow: Tensor
    valid: Tensor  # (H, W)


@dataclass(frozen=True)
class Augment:
    """The augmentations of a training set.

    Args:
        crop: height and width of the result.
        scale: range of the scale's logarithm to base 2.
        flips: whether to mirror pairs.
        sparse: whether the true flow is sparse, as KITTI's: never blend its pixels.
        colour: whether to change colours.
        erase: chance to paint over boxes of the second frame.
    """

    crop: tuple[int, int]
    scale: tuple[float, float] = (-0.2, 0.6)
    flips: bool = True
    sparse: bool = False
    colour: bool = True
    erase: float = 0.5

    def __call__(self, pair: Pair, rng: torch.Generator) -> Pair:
        pair = self.recolour(pair, rng)
        if _chance(self.erase, rng):
            pair = pair._replace(image2=erase_boxes(pair.image2, rng))
        pair = self._rescale(pair, rng)
        if self.flips:
            pair = _flip(pair, rng, vertical=not self.sparse)
        return self._crop(pair, rng)

    def recolour(self, pair: Pair, rng: torch.Generator) -> Pair:
        """Return a pair in other colours; a fifth of dense pairs change differently by frame."""
        if not self.colour:
            return pair
        strength, hue = (0.3, 0.3 / 3.14) if self.sparse else (0.4, 0.5 / 3.14)
        first = Jitter.draw(strength, hue, rng)
        if not self.sparse and _chance(0.2, rng):
            second = Jitter.draw(strength, hue, rng)
            return pair._replace(image1=first(pair.image1), image2=second(pair.image2))
        both = first(torch.cat((pair.image1, pair.image2), dim=1))  # one mean for both frames
        image1, image2 = both.chunk(2, dim=1)
        return pair._replace(image1=image1, image2=image2)

    def _rescale(self, pair: Pair, rng: torch.Generator) -> Pair:
        height, width = pair.valid.shape
        margin = 1 if self.sparse else 8
        least = max((self.crop[0] + margin) / height, (self.crop[1] + margin) / width)
        sx = sy = 2 ** _uniform(*self.scale, rng)
        if not self.sparse and _chance(0.8, rng):
            sx, sy = sx * 2 ** _uniform(-0.2, 0.2, rng), sy * 2 ** _uniform(-0.2, 0.2, rng)
        sx, sy = max(sx, least), max(sy, least)
        fits = height >= self.crop[0] and width >= self.crop[1]
        if fits and not _chance(0.8, rng):
            return pair
        return (resize_sparse if self.sparse else resize_dense)(pair, sx, sy)

    def _crop(self, pair: Pair, rng: torch.Generator) -> Pair:
        (height, width), (h, w) = pair.valid.shape, self.crop
        below, aside = (20, 50) if self.sparse else (0, 0)  # favours the borders of the road
        top = int(torch.randint(0, height - h + 1 + below, (), generator=rng))
        left = int(torch.randint(-aside, width - w + 1 + aside, (), generator=rng))
        top, left = min(max(top, 0), height - h), min(max(left, 0), width - w)
        return Pair(*(each[..., top : top + h, left : left + w] for each in pair))


def with_noise(pair: Pair, largest: float, rng: torch.Generator) -> Pair:
    """Return a pair with noise of one strength, up to `largest`, on frames as floats."""
    sigma = _uniform(0, largest, rng)
    image1, image2 = (
        (each + sigma * torch.randn(each.shape, generator=rng)).clamp(0, 255) for each in pair[:2]
    )
    return pair._replace(image1=image1, image2=image2)


def resize_dense(pair: Pair, sx: float, sy: float) -> Pair:
    """Return a pair at another size; the flow grows with it."""
    height, width = pair.valid.shape
    size = (max(1, round(height * sy)), max(1, round(width * sx)))
    factor = torch.tensor([sx, sy], dtype=pair.flow.dtype)[:, None, None]
    # A pixel is valid if all pixels behind it are: the others hold arbitrary numbers.
    valid = _resize(pair.valid[None].float(), size)[0]
    return Pair(
        _resize_image(pair.image1, size),
        _resize_image(pair.image2, size),
        _resize(pair.flow, size) * factor,
        valid > 0.999,
    )


def resize_sparse(pair: Pair, sx: float, sy: float) -> Pair:
    """Return a pair at another size; every valid flow goes to the nearest pixel, and grows."""
    height, width = pair.valid.shape
    size = (max(1, round(height * sy)), max(1, round(width * sx)))
    y, x = pair.valid.nonzero(as_tuple=True)
    factor = torch.tensor([sx, sy], dtype=pair.flow.dtype)[:, None]
    to_x, to_y = (x * sx).round().long(), (y * sy).round().long()
    inside = (to_x < size[1]) & (to_y < size[0])
    flow = pair.flow.new_zeros(2, *size)
    valid = torch.zeros(size, dtype=torch.bool)
    flow[:, to_y[inside], to_x[inside]] = (pair.flow[:, y, x] * factor)[:, inside]
    valid[to_y[inside], to_x[inside]] = True
    return Pair(_resize_image(pair.image1, size), _resize_image(pair.image2, size), flow, valid)


def erase_boxes(image: Tensor, rng: torch.Generator) -> Tensor:
    """Return an image with one or two boxes of 50 to 99 pixels in its mean colour."""
    image = image.clone()
    mean = image.float().mean(dim=(1, 2)).to(image.dtype)[:, None, None]
    for _ in range(int(torch.randint(1, 3, (), generator=rng))):
        top = int(torch.randint(image.shape[1], (), generator=rng))
        left = int(torch.randint(image.shape[2], (), generator=rng))
        h, w = torch.randint(50, 100, (2,), generator=rng).tolist()
        image[:, top : top + h, left : left + w] = mean
    return image


@dataclass(frozen=True)
class Jitter:
    """A change of colours: factors, a turn of the hue, and the order in which they apply."""

    brightness: float
    contrast: float
    saturation: float
    hue: float  # in turns
    order: tuple[int, ...]

    @classmethod
    def draw(cls, strength: float, hue: float, rng: torch.Generator) -> Jitter:
        """Return random factors within `1 ± strength` and a turn within `± hue`."""
        a, b, c = (_uniform(1 - strength, 1 + strength, rng) for _ in range(3))
        order = tuple(torch.randperm(4, generator=rng).tolist())
        return cls(a, b, c, _uniform(-hue, hue, rng), order)

    def __call__(self, image: Tensor) -> Tensor:
        """Return an image (3, H, W) of bytes in other colours."""
        x = image.float() / 255
        for kind in self.order:
            if kind == 0:
                x = x * self.brightness
            elif kind == 1:
                x = torch.lerp(_grey(x).mean(), x, self.contrast)
            elif kind == 2:
                x = torch.lerp(_grey(x), x, self.saturation)
            else:
                x = turn_hue(x, self.hue)
            x = x.clamp(0, 1)
        return (255 * x).round().byte()


def turn_hue(x: Tensor, turns: float) -> Tensor:
    """Return colours (3, H, W) in [0, 1] with another hue, the same value and saturation."""
    value, least = x.amax(0), x.amin(0)
    chroma = value - least
    safe = torch.where(chroma > 0, chroma, 1)
    r, g, b = x
    sixth = torch.where(
        value == r, (g - b) / safe, torch.where(value == g, 2 + (b - r) / safe, 4 + (r - g) / safe)
    )
    hue = (sixth + 6 * turns) % 6

    def channel(shift: int) -> Tensor:
        k = (shift + hue) % 6
        return value - chroma * torch.minimum(k, 4 - k).clamp(0, 1)

    return torch.stack((channel(5), channel(3), channel(1)))


def _flip(pair: Pair, rng: torch.Generator, vertical: bool) -> Pair:
    if _chance(0.5, rng):
        pair = mirrored(pair, axis=0)
    if vertical and _chance(0.1, rng):
        pair = mirrored(pair, axis=1)
    return pair


def mirrored(pair: Pair, axis: int) -> Pair:
    """Return a pair mirrored along x (`axis` 0) or y (1)."""
    image1, image2, flow, valid = (each.flip(-1 - axis) for each in pair)
    flow[axis].neg_()
    return Pair(image1, image2, flow, valid)


def _grey(x: Tensor) -> Tensor:
    """Return the luma (1, H, W) of colours (3, H, W)."""
    return (x * x.new_tensor([0.299, 0.587, 0.114])[:, None, None]).sum(0, keepdim=True)


def _resize(x: Tensor, size: tuple[int, int]) -> Tensor:
    return F.interpolate(x[None], size=size, mode="bilinear", align_corners=False)[0]


def _resize_image(image: Tensor, size: tuple[int, int]) -> Tensor:
    return _resize(image.float(), size).round().clamp(0, 255).byte()


def _uniform(low: float, high: float, rng: torch.Generator) -> float:
    return low + (high - low) * float(torch.rand((), generator=rng, dtype=torch.float64))


def _chance(p: float, rng: torch.Generator) -> bool:
    return _uniform(0, 1, rng) < p
