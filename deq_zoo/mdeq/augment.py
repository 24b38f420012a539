"""What happens to images on their way into a network: crops, flips, resizing, normalisation.

Crops, flips and resizes keep the pixels' dtype, so images stay bytes until `normalise`, the
last step. Whatever is random draws from the generator it is given, and from nothing else. A batch
is `(B, C, H, W)`, one image `(C, H, W)`.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from deq_zoo.images.labelled import Channels

_ATTEMPTS = 10  # boxes drawn before the centre of the image is taken


def normalise(pixels: Tensor, channels: Channels, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return bytes as `(pixel / 255 - mean) / std`, channel by channel."""
    if pixels.dtype != torch.uint8:
        raise TypeError(f"pixels must be bytes (torch.uint8), got {pixels.dtype}")
    if pixels.dim() < 3 or pixels.shape[-3] != len(channels.mean):
        raise ValueError(
            f"pixels must be (..., {len(channels.mean)}, height, width), got {tuple(pixels.shape)}"
        )
    mean, std = (
        torch.tensor(c, dtype=torch.float64, device=pixels.device)[:, None, None] for c in channels
    )
    # One multiplication and one addition a pixel, with constants rounded once.
    scale, shift = (1 / (255 * std)).to(dtype), (-mean / std).to(dtype)
    return pixels.to(dtype).mul_(scale).add_(shift)


def random_flip(images: Tensor, generator: torch.Generator, p: float = 0.5) -> Tensor:
    """Return a batch whose images are mirrored left to right with probability `p` each."""
    _check_batch(images)
    flipped = torch.rand(len(images), generator=generator) < p
    return torch.where(flipped.to(images.device)[:, None, None, None], images.flip(-1), images)


def random_crop(images: Tensor, size: int, generator: torch.Generator, padding: int = 0) -> Tensor:
    """Return a random square of each image of a batch, after `padding` zeros on every side."""
    _check_batch(images)
    padded = F.pad(images, (padding,) * 4)
    height, width = padded.shape[2:]
    _check_fits(size, height, width)
    top = torch.randint(height - size + 1, (len(images), 1), generator=generator)
    left = torch.randint(width - size + 1, (len(images), 1), generator=generator)
    side = torch.arange(size)
    rows = (top + side).to(images.device)[:, None, :, None]  # (B, 1, size, 1)
    columns = (left + side).to(images.device)[:, None, None, :]
    batch = torch.arange(len(images), device=images.device)[:, None, None, None]
    channel = torch.arange(images.shape[1], device=images.device)[None, :, None, None]
    return padded[batch, channel, rows, columns]


def random_resized_crop(
    image: Tensor,
    size: int,
    generator: torch.Generator,
    area: tuple[float, float] = (0.1, 1.0),
    aspect: tuple[float, float] = (0.8, 1.25),
) -> Tensor:
    """Return a random box of one image, resized to a square.

    Args:
        image: (C, H, W).
        size: of the square.
        generator: of the box.
        area: the box's share of the image, drawn uniformly.
        aspect: its width over its height, drawn log-uniformly.
    """
    top, left, height, width = random_box(
        image.shape[-2], image.shape[-1], generator, area=area, aspect=aspect
    )
    return resize(image[..., top : top + height, left : left + width], size, size)


def random_box(
    height: int,
    width: int,
    generator: torch.Generator,
    area: tuple[float, float],
    aspect: tuple[float, float],
) -> tuple[int, int, int, int]:
    """Top, left, height and width of a random box inside an image.

    If none of a few draws fits, the largest box in the middle whose aspect is allowed.
    """
    if not (0 < area[0] <= area[1] <= 1 and 0 < aspect[0] <= aspect[1]):
        raise ValueError(
            f"area must rise within (0, 1] and aspect within positive numbers, got {area}, {aspect}"
        )
    for _ in range(_ATTEMPTS):
        a, b = torch.rand(2, generator=generator, dtype=torch.float64).tolist()
        surface = height * width * (area[0] + a * (area[1] - area[0]))
        ratio = aspect[0] * (aspect[1] / aspect[0]) ** b
        h, w = round(math.sqrt(surface / ratio)), round(math.sqrt(surface * ratio))
        if 0 < h <= height and 0 < w <= width:
            top = int(torch.randint(height - h + 1, (), generator=generator))
            left = int(torch.randint(width - w + 1, (), generator=generator))
            return top, left, h, w
    h = min(height, max(1, round(width / aspect[0])))
    w = min(width, max(1, round(height * aspect[1])))
    return (height - h) // 2, (width - w) // 2, h, w


def resize_shorter(image: Tensor, size: int) -> Tensor:
    """Return an image with its shorter side resized to `size` and its shape kept."""
    height, width = image.shape[-2:]
    shorter = min(height, width)
    return resize(image, height * size // shorter, width * size // shorter)


def center_crop(image: Tensor, size: int) -> Tensor:
    """Return the square in the middle."""
    height, width = image.shape[-2:]
    _check_fits(size, height, width)
    top, left = (height - size) // 2, (width - size) // 2
    return image[..., top : top + size, left : left + size]


def resize(image: Tensor, height: int, width: int) -> Tensor:
    """Return an image or batch at another size, by a triangle filter."""
    if image.shape[-2:] == (height, width):
        return image
    single = image.dim() == 3
    batch = image[None] if single else image
    exact = batch if batch.is_floating_point() else batch.to(torch.float32)
    out = F.interpolate(exact, size=(height, width), mode="bilinear", antialias=True)
    if not batch.is_floating_point():
        out = out.round_().clamp_(0, 255).to(batch.dtype)
    return out[0] if single else out


def _check_batch(images: Tensor) -> None:
    if images.dim() != 4:
        raise ValueError(f"a batch must be (B, C, H, W), got {tuple(images.shape)}")


def _check_fits(size: int, height: int, width: int) -> None:
    if not 0 < size <= min(height, width):
        raise ValueError(f"a square of {size} does not fit into {height} x {width}")
