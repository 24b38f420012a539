"""The signals of presets: photographs of scikit-image, files, the paper's data sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from deq_zoo.arrays import read_archive, read_array
from deq_zoo.data_dir import data_folder
from deq_zoo.errors import DataError
from deq_zoo.images.photographs import photograph
from deq_zoo.inr.readers import AUDIO, IMAGES, VIDEOS, kind_of, read_signal
from deq_zoo.inr.signal import Kind, Signal

Source = Literal[
    "astronaut", "chelsea", "coffee", "camera", "ripples", "file",
    "nature", "text", "celeba", "video", "audio",
]  # fmt: skip
PHOTOS = ("astronaut", "chelsea", "coffee", "camera")
_ARCHIVES = {"nature": "data_div2k.npz", "text": "data_2d_text.npz"}
_FACES, _SIDE = "celeba_128_tiny.npy", 128
_FOLDERS = {"nature": IMAGES, "text": IMAGES, "video": VIDEOS, "audio": AUDIO}
_SQUARE = 512  # of the paper's photographs


def kind_of_source(source: Source, file: str | None) -> Kind:
    """Return the kind of signal of a source, without opening it."""
    if source == "file":
        return kind_of(require_file(file))
    return {"video": "video", "audio": "audio"}.get(source, "image")  # type: ignore[return-value]


def open_signal(
    source: Source,
    channels: int,
    file: str | None,
    data_dir: str | None,
    index: int,
    length: int = 0,
) -> Signal:
    """Return the signal of a source.

    Args:
        source: its name.
        channels: 1 or 3, for images.
        file: the path, for the source `file`.
        data_dir: the folder, for data sets.
        index: the number of the signal in a data set.
        length: read only so many frames of a video; 0 reads all.
    """
    if source == "file":
        return read_signal(require_file(file), channels, length)
    if source == "ripples":
        return Signal("image", ripples(channels))
    if source in PHOTOS:
        return Signal("image", with_channels(photograph(source), channels))
    root = data_folder(data_dir, source)
    if source == "celeba":
        return Signal("image", with_channels(_face(root, index), channels))
    archive = root / _ARCHIVES.get(source, "")
    if source in _ARCHIVES and archive.is_file():
        return Signal("image", with_channels(_archived(archive, index), channels))
    files = sorted(path for path in root.rglob("*") if path.suffix.lower() in _FOLDERS[source])
    if not files:
        what = f"{archive.name} or " if source in _ARCHIVES else ""
        raise DataError(f"{root} should hold {what}files that end in {', '.join(_FOLDERS[source])}")
    signal = read_signal(_pick(files, index, root), channels, length)
    return crop(signal, _SQUARE) if source in _ARCHIVES else signal


def crop(signal: Signal, side: int = 0, shrink: int = 1, length: int = 0) -> Signal:
    """Return a part of a signal.

    Args:
        signal: the whole.
        side: of a square in the middle of every picture; 0 keeps the whole picture.
        shrink: divide the sides of pictures by this, by the mean over squares of pixels.
        length: keep so many frames or samples from the start; 0 keeps all.
    """
    values = signal.values
    if length:
        if signal.kind == "image":
            raise DataError(
                "length is an option for sounds and videos, and this is an image: drop it"
            )
        values = values[:length]
    if signal.kind == "audio":
        if side or shrink > 1:
            raise DataError(
                "side and shrink are options for pictures, and this is a sound: drop them"
            )
        return Signal("audio", values, signal.rate)
    if shrink > 1:
        values = _shrink(values, shrink)
    if side:
        height, width = values.shape[-3:-1]
        if side > min(height, width):
            raise DataError(f"a square of {side} does not fit into {height} x {width} pixels")
        top, left = (height - side) // 2, (width - side) // 2
        values = values[..., top : top + side, left : left + side, :]
    return Signal(signal.kind, values.contiguous(), signal.rate)


def ripples(channels: int, side: int = 16) -> Tensor:
    """Return a synthetic image (side, side, channels) for tests, as bytes."""
    axis = torch.linspace(0, 6, side)
    down = torch.sin(axis[:, None] * torch.arange(1, channels + 1))  # (side, channels)
    waves = down[:, None] + axis.cos()[None, :, None]
    return (127.5 + 60 * waves).byte()


def require_file(file: str | None) -> Path:
    """Return the path of the source `file`; raise `DataError` if there is none."""
    if file is None:
        raise DataError("file is None: give an image, sound or video with --set file=PATH")
    return Path(file).expanduser()


def _shrink(values: Tensor, times: int) -> Tensor:
    height, width = (n // times for n in values.shape[-3:-1])
    if not height or not width:
        raise DataError(f"{values.shape[-3]} x {values.shape[-2]} pixels cannot shrink by {times}")
    cut = values[..., : height * times, : width * times, :]
    squares = cut.reshape(*values.shape[:-3], height, times, width, times, values.shape[-1])
    mean = squares.float().mean(dim=(-4, -2))
    return mean if values.is_floating_point() else mean.round().byte()


def with_channels(pixels: Tensor, channels: int) -> Tensor:
    """Return pixels with 1 or 3 channels: grey three times, or the mean of colours."""
    if pixels.shape[-1] == channels:
        return pixels
    if pixels.shape[-1] == 1:
        return pixels.repeat(*[1] * (pixels.dim() - 1), channels)
    mean = pixels.float().mean(-1, keepdim=True)
    return (mean if pixels.is_floating_point() else mean.round().byte()).repeat(1, 1, channels)


def _archived(path: Path, index: int) -> Tensor:
    """Return a test image of a data set of the Fourier-features paper, (H, W, 3)."""
    images = read_archive(path, "test_data", rest=False)["test_data"]
    if images.ndim != 4 or images.shape[-1] not in (1, 3):
        raise DataError(f"'test_data' in {path} should be (n, H, W, 3), got {images.shape}")
    return _as_pixels(_pick(images, index, path), path)


def _face(root: Path, index: int) -> Tensor:
    path = root / _FACES
    if not path.is_file():
        raise DataError(f"{root} should hold {_FACES}, images of 128 x 128 x 3")
    images = read_array(path, mapped=True)
    if images.size % (_SIDE * _SIDE * 3):
        raise DataError(f"{path} should hold images of 128 x 128 x 3, got {images.shape}")
    return _as_pixels(_pick(images.reshape(-1, _SIDE, _SIDE, 3), index, path), path)


def _as_pixels(image: Any, path: Path) -> Tensor:
    """Return bytes as they are, and numbers from 0 to 255 divided by 255."""
    if image.dtype.kind not in "uif":
        raise DataError(f"the pixels in {path} should be numbers, got {image.dtype}")
    if image.dtype == np.uint8:
        return torch.from_numpy(np.array(image))
    low, high = float(image.min()), float(image.max())
    if not 0 <= low <= high <= 255:
        raise DataError(
            f"the pixels in {path} should be from 0 to 1 or from 0 to 255, got {low:.4g} to "
            f"{high:.4g}"
        )
    pixels = torch.from_numpy(np.array(image, dtype=np.float32))
    return pixels / 255 if high > 1 else pixels


def _pick(items: Any, index: int, source: Path) -> Any:
    if not 0 <= index < len(items):
        raise DataError(f"{source} has {len(items)} signals, numbered from 0: got index={index}")
    return items[index]
