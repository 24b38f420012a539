"""Sets of images in memory and in files, as floats in [-1, 1] with channels first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, Self

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from deq_zoo.errors import DataError
from deq_zoo.images.files import open_image

Box = tuple[int, ...]  # left, top, right, bottom
#: The part of an aligned picture of CelebA that shows the face.
CELEBA_BOX: Box = (25, 57, 153, 185)


class Images(Protocol):
    """A set of images of one size."""

    def __len__(self) -> int: ...

    def take(self, rows: Tensor) -> Tensor:
        """Return some of the images, (n, C, H, W) in [-1, 1]."""
        ...

    def subset(self, rows: Tensor) -> Self:
        """Return a set of some of the images."""
        ...


@dataclass(frozen=True, eq=False)
class InMemory:
    """Images as bytes, (N, C, H, W)."""

    pixels: Tensor

    def __len__(self) -> int:
        return len(self.pixels)

    def take(self, rows: Tensor) -> Tensor:
        return scaled(self.pixels[rows])

    def subset(self, rows: Tensor) -> InMemory:
        return InMemory(self.pixels[rows])


@dataclass(frozen=True, eq=False)
class Files:
    """Image files, which `take` reads."""

    paths: Sequence[Path]
    size: int
    channels: int
    box: Box | None = None

    def __len__(self) -> int:
        return len(self.paths)

    def take(self, rows: Tensor) -> Tensor:
        paths = [self.paths[int(i)] for i in rows]
        return torch.stack([read_image(p, self.size, self.channels, self.box) for p in paths])

    def subset(self, rows: Tensor) -> Files:
        return replace(self, paths=[self.paths[int(i)] for i in rows])


def scaled(pixels: Tensor) -> Tensor:
    """Return bytes as floats in [-1, 1]."""
    return pixels.float() / 127.5 - 1


def to_bytes(images: Tensor) -> Tensor:
    """Return floats in [-1, 1] as bytes; values outside are clipped."""
    return ((images.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)


def read_image(path: Path, size: int, channels: int, box: Box | None = None) -> Tensor:
    """Return an image file as (C, size, size) in [-1, 1].

    The image is turned as its camera says; transparent parts are white. See `fit_image`.
    """
    return scaled(fit_image(open_image(path), size, channels, box, str(path)))


def fit_image(image: Image.Image, size: int, channels: int, box: Box | None, name: str) -> Tensor:
    """Return the middle of an image, or of a part of it, as (C, size, size) bytes.

    Args:
        image: the image.
        size: the side to which the middle is resized.
        channels: 1 for grey, 3 for colours.
        box: the part of the image; None for all of it.
        name: what an error calls the image.
    """
    image = image.convert("RGB" if channels == 3 else "L")
    if box is not None:
        left, top, right, bottom = box
        if image.width < right or image.height < bottom:
            raise DataError(
                f"{name} is {image.width} x {image.height}, too small to be cut to {box}: aligned "
                "pictures of CelebA, 178 x 218, are expected"
            )
        image = image.crop((left, top, right, bottom))
    array = np.array(ImageOps.fit(image, (size, size), Image.Resampling.BICUBIC))
    return torch.from_numpy(array.reshape(size, size, channels)).permute(2, 0, 1)
