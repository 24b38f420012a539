"""Images with labels, in memory or one folder per class.

They come as unsigned bytes, channels first.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from deq_zoo.errors import DataError
from deq_zoo.images.files import SUFFIXES, read_image

SPLITS = ("train", "test")


class Channels(NamedTuple):
    """Mean and standard deviation of each channel, for pixels in [0, 1]."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


IMAGENET_CHANNELS = Channels((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@dataclass(frozen=True, eq=False)
class Images(Dataset[tuple[Tensor, int]]):
    """Images of one size, in memory.

    Args:
        pixels: (N, C, H, W), unsigned bytes.
        labels: (N,), 64-bit integers.
        classes: the name of each label.
        channels: what to normalise with.
    """

    pixels: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    channels: Channels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.pixels[index], int(self.labels[index])

    def subset(self, rows: Tensor) -> Images:
        """Return some of the images."""
        return replace(self, pixels=self.pixels[rows], labels=self.labels[rows])


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """Images in one folder per class, read when they are asked for: ImageNet's usual form.

    An item is an image (3, H, W) of unsigned bytes, and its label: the place of its folder in the
    alphabet.

    Args:
        root: holds a folder per class with image files, at any depth.
        channels: what to normalise with.
    """

    def __init__(self, root: str | Path, channels: Channels = IMAGENET_CHANNELS) -> None:
        root = Path(root)
        folders = sorted(p for p in root.iterdir() if p.is_dir()) if root.is_dir() else []
        if not folders:
            raise DataError(f"{root} must hold one folder of images per class, but has none")
        self.classes = tuple(folder.name for folder in folders)
        self.channels = channels
        self.files: list[tuple[Path, int]] = []
        for label, folder in enumerate(folders):
            images = sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES)
            if not images:
                raise DataError(f"{folder} is a class without images ({', '.join(SUFFIXES)})")
            self.files += [(path, label) for path in images]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.files[index]
        return read_image(path), label

    @property
    def labels(self) -> Tensor:
        """Return the label of every file, (N,)."""
        return torch.tensor([label for _, label in self.files])

    def subset(self, rows: Tensor) -> ImageFolder:
        """Return some of the images, of the same classes."""
        part = copy(self)
        part.files = [self.files[k] for k in rows.tolist()]
        return part

    def load(self) -> Images:
        """Return all images in memory; they must be of one size."""
        pixels = stack([read_image(path) for path, _ in self.files])
        return Images(pixels, self.labels, self.classes, self.channels)


Labelled = Images | ImageFolder


def stack(images: list[Tensor]) -> Tensor:
    """Return images of one size as a batch."""
    sizes = sorted({tuple(image.shape[1:]) for image in images})
    if len(sizes) != 1:
        raise DataError(f"images of one size are needed here, got {sizes[:3] or 'none'}")
    return torch.stack(images)


def hold_out(data: Labelled, n: int, seed: int = 0) -> tuple[Labelled, Labelled]:
    """Return the data without `n` images, and those, the same share of every class.

    Args:
        data: the images.
        n: about how many to hold out; at least one image of the data stays.
        seed: of the choice.
    """
    if not 0 < n < len(data):
        raise DataError(f"{n} of {len(data)} training images cannot be held out for validation")
    rng = torch.Generator().manual_seed(seed)
    kept, held_out = stratified(data.labels, 1 - n / len(data), rng)
    return data.subset(kept), data.subset(held_out)


def stratified(labels: Tensor, share: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return indices of a random `share` of every class, and of the rest, each in rising order."""
    first, second = [], []
    for label in labels.unique():
        members = torch.nonzero(labels == label).flatten()
        members = members[torch.randperm(len(members), generator=generator)]
        cut = round(share * len(members))
        first.append(members[:cut])
        second.append(members[cut:])
    return torch.cat(first).sort().values, torch.cat(second).sort().values
