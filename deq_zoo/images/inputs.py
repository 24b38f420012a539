"""Images as users have them: a path, Pillow's image, an array or a tensor."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from deq_zoo.errors import DataError
from deq_zoo.images.files import pixels_of, read_image

#: What `as_image` takes.
ImageLike = str | os.PathLike[str] | Image.Image | np.ndarray[Any, Any] | Tensor


def as_image(image: ImageLike) -> Tensor:
    """Return an image as bytes (3, H, W); grey becomes three equal channels.

    Args:
        image: a path; an image of Pillow; an array (H, W), (H, W, 1) or (H, W, 3); a tensor (H, W),
            (1, H, W) or (3, H, W). Numbers are bytes from 0 to 255, or floating point from 0 to 1.
    """
    if isinstance(image, (str, os.PathLike)):
        return read_image(Path(image))
    if isinstance(image, Image.Image):
        return pixels_of(image)
    if isinstance(image, np.ndarray):
        planes = torch.from_numpy(np.ascontiguousarray(image))
        planes = planes.permute(2, 0, 1) if planes.dim() == 3 else planes
    elif isinstance(image, Tensor):
        planes = image.detach().cpu()
    else:
        raise TypeError(
            f"an image is a path, a Pillow image, an array or a tensor, got {type(image).__name__}"
        )
    planes = planes[None] if planes.dim() == 2 else planes
    if planes.dim() != 3 or planes.shape[0] not in (1, 3) or not planes.numel():
        raise ValueError(
            "an image has one or three channels, last in an array and first in a tensor; got "
            f"{type(image).__name__} of shape {tuple(image.shape)}"
        )
    return _as_bytes(planes).expand(3, -1, -1).contiguous()


def _as_bytes(pixels: Tensor) -> Tensor:
    if pixels.dtype == torch.uint8:
        return pixels
    if pixels.dtype == torch.bool:
        return pixels.byte() * 255
    if not pixels.is_floating_point():
        raise TypeError(f"pixels are bytes, or floating point from 0 to 1, got {pixels.dtype}")
    low, high = pixels.min().item(), pixels.max().item()
    if not (low >= 0 and high <= 1):  # NaN, too
        raise DataError(
            f"pixels in floating point must lie from 0 to 1, got {low:.4g} to {high:.4g}: divide "
            "bytes by 255, and do not normalise them"
        )
    return (pixels.double() * 255).round().byte()
