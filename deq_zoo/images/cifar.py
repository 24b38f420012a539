"""CIFAR-10 in its public forms."""

from __future__ import annotations

import io
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deq_zoo.arrays import read_archive, unpickle_arrays
from deq_zoo.errors import DataError
from deq_zoo.images.files import read_image
from deq_zoo.images.labelled import SPLITS, Channels, ImageFolder, Images, stack
from torchdeq.registry import suggest

CIFAR10_CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
CIFAR10_CHANNELS = Channels((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))


def cifar10(root: str | Path, split: str = "train", form: str | None = None) -> Images:
    """Read CIFAR-10 from disk.

    Args:
        root: the folder.
        split: `train` or `test`.
        form: `batches`, the official Python files; `folders`, an image file each in
            `train/<class>/`; `jpeg` or `lossless`, archives
            `cifar10_<form>_<split>*.npz`. By default the first of these that is there.
    """
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}{suggest(split, SPLITS)}")
    if form is not None and form not in _FORMS:
        raise ValueError(f"unknown form {form!r}{suggest(form, _FORMS)}")
    for name in (form,) if form else _FORMS:
        paths, read = _FORMS[name](Path(root), split)
        lacking = [path.name for path in paths if not path.exists()]
        if not lacking:
            return _check_cifar10(read(paths), paths[0])
        if len(lacking) < len(paths):
            raise DataError(f"{paths[0].parent} lacks {', '.join(lacking)}")
    raise DataError(
        f"no {split} images of CIFAR-10 in {root} (form: {form or 'any'}): put there the folder "
        "cifar-10-batches-py of the official archive cifar-10-python.tar.gz, or train/ and test/ "
        "with a folder of images per class, or cifar10_lossless_train.npz and "
        "cifar10_lossless_test.npz"
    )


Reader = Callable[[list[Path]], Images]


def _batches(root: Path, split: str) -> tuple[list[Path], Reader]:
    folder = root / "cifar-10-batches-py"
    folder = folder if folder.is_dir() else root
    names = [f"data_batch_{k}" for k in range(1, 6)] if split == "train" else ["test_batch"]
    return [folder / name for name in names], _read_batches


def _folders(root: Path, split: str) -> tuple[list[Path], Reader]:
    return [root / split], lambda paths: ImageFolder(paths[0], CIFAR10_CHANNELS).load()


def _archive(form: str) -> Callable[[Path, str], tuple[list[Path], Reader]]:
    def find(root: Path, split: str) -> tuple[list[Path], Reader]:
        pattern = f"cifar10_{form}_{split}*.npz"
        return sorted(root.glob(pattern))[:1] or [root / pattern], _read_archive

    return find


_FORMS = {
    "batches": _batches,
    "folders": _folders,
    "jpeg": _archive("jpeg"),
    "lossless": _archive("lossless"),
}


def _read_batches(paths: list[Path]) -> Images:
    pixels, labels = [], []
    for path in paths:
        batch = read_batch(path)
        x, y = batch.get(b"data"), batch.get(b"labels")
        if not isinstance(x, np.ndarray) or x.dtype != np.uint8 or x.shape[1:] != (3 * 32 * 32,):
            raise DataError(f"{path} is no CIFAR-10 batch: its 'data' are no rows of 3072 bytes")
        if not isinstance(y, list) or not all(isinstance(label, int) for label in y):
            raise DataError(f"{path} is no CIFAR-10 batch: its 'labels' are no list of numbers")
        pixels.append(x.reshape(-1, 3, 32, 32))
        labels += y
    return _cifar10(np.concatenate(pixels), labels)


def _read_archive(paths: list[Path]) -> Images:
    arrays = read_archive(paths[0])
    if {"jpeg", "ptr", "y"} <= set(arrays):
        data, ends = arrays["jpeg"].tobytes(), arrays["ptr"].tolist()
        pixels = stack([read_image(io.BytesIO(data[a:b])) for a, b in pairwise(ends)]).numpy()
    elif {"x", "y"} <= set(arrays) and arrays["x"].ndim == 4:
        pixels = arrays["x"].transpose(0, 3, 1, 2)
    else:
        raise DataError(
            f"{paths[0]} must hold x (N, H, W, C) and y, or jpeg, ptr and y; got {sorted(arrays)}"
        )
    return _cifar10(pixels, arrays["y"])


def _cifar10(pixels: NDArray[np.uint8], labels: Any) -> Images:
    images = torch.from_numpy(np.ascontiguousarray(pixels))
    return Images(images, _labels(labels), CIFAR10_CLASSES, CIFAR10_CHANNELS)


def _labels(labels: Any) -> Tensor:
    return torch.from_numpy(np.asarray(labels, dtype=np.int64))


def _check_cifar10(images: Images, path: Path) -> Images:
    pixels, labels = images.pixels, images.labels
    if pixels.dtype != torch.uint8 or pixels.shape != (len(labels), 3, 32, 32):
        raise DataError(
            f"{path}: expected 32 x 32 images of bytes, one per label, got "
            f"{tuple(pixels.shape)} {pixels.dtype} for {len(labels)} labels"
        )
    if images.classes != CIFAR10_CLASSES:
        raise DataError(f"{path}: the classes are {CIFAR10_CLASSES}, got {images.classes}")
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < len(CIFAR10_CLASSES):
        raise DataError(f"{path}: labels run from 0 to 9, got {labels.min()} to {labels.max()}")
    return images


def read_batch(path: str | Path) -> dict[Any, Any]:
    """Read a dict of arrays and plain containers from a pickle; strings of Python 2 are bytes."""
    batch = unpickle_arrays(Path(path), encoding="bytes")
    if not isinstance(batch, dict):
        raise DataError(f"{path} must hold a dict, got {type(batch).__name__}")
    return batch
