"""Images in [-1, 1] as PNG files, alone or side by side."""

from __future__ import annotations

import io

from PIL import Image
from torch import Tensor

from deq_zoo.diffusion.data import to_bytes

GAP = 2  # pixels between images


def montage(images: Tensor, columns: int) -> Tensor:
    """Return (N, C, H, W) images side by side, with white between them: (C, height, width)."""
    columns = max(1, min(columns, len(images)))
    rows = max(1, -(-len(images) // columns))
    C, H, W = images.shape[1:]
    page = images.new_ones(C, rows * (H + GAP) - GAP, columns * (W + GAP) - GAP)
    for k, image in enumerate(images):
        top, left = k // columns * (H + GAP), k % columns * (W + GAP)
        page[:, top : top + H, left : left + W] = image
    return page


def as_png(image: Tensor) -> bytes:
    """Return a (C, H, W) image, bytes or in [-1, 1], as the bytes of a PNG file."""
    pixels = image if image.dtype.itemsize == 1 else to_bytes(image)
    array = pixels.cpu().permute(1, 2, 0).numpy()
    buffer = io.BytesIO()
    Image.fromarray(array.squeeze(2) if array.shape[2] == 1 else array).save(buffer, "PNG")
    return buffer.getvalue()
