"""An image file as a viewer would show it."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from deq_zoo.errors import DataError

SUFFIXES = (".jpeg", ".jpg", ".png", ".webp")


def open_image(source: str | Path | io.BytesIO, on_white: bool = True) -> Image.Image:
    """Return an image of 8 bits a channel, turned as its camera says.

    Grey of 16 bits is divided by 257; grey in floating point must lie from 0 to 1.

    Args:
        source: a file, or its bytes.
        on_white: whether white shows where it is transparent; else transparency stays.
    """
    place = "an image of an archive" if isinstance(source, io.BytesIO) else source
    try:
        with Image.open(source) as file:
            image = _in_bytes(ImageOps.exif_transpose(file))
            image.load()
            return _on_white(image) if on_white else image
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # Pillow's
        raise DataError(f"cannot read {place}: {error}") from error


def _in_bytes(image: Image.Image) -> Image.Image:
    """Return an image with 8 bits a channel: Pillow's own conversion would cut more off at 255."""
    if image.mode != "F" and not image.mode.startswith("I"):
        return image
    top = 1 if image.mode == "F" else 65535
    values = np.array(image, dtype=np.float64)
    if not (values.min() >= 0 and values.max() <= top):
        raise ValueError(
            f"it holds numbers from {values.min():.4g} to {values.max():.4g}, expected 0 to {top}: "
            "save it with 8 bits"
        )
    return Image.fromarray(np.rint(values * (255 / top)).astype(np.uint8))


def read_image(source: str | Path | io.BytesIO) -> Tensor:
    """Return an image file as bytes (3, H, W), whatever its colours were."""
    return _planes(open_image(source))


def pixels_of(image: Image.Image) -> Tensor:
    """Return an image of Pillow's as bytes (3, H, W), on white where it is transparent."""
    try:
        return _planes(_on_white(_in_bytes(image)))
    except (OSError, SyntaxError, ValueError) as error:  # Pillow's
        raise DataError(f"cannot read an image of Pillow's: {error}") from error


def _planes(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).contiguous()


def _on_white(image: Image.Image) -> Image.Image:
    if not image.has_transparency_data:
        return image
    ground = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(ground, image.convert("RGBA"))
