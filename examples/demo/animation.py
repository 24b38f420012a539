"""Animated pictures: PNG files of several frames, which browsers play without a script."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor


def animated(frames: Iterable[Figure], seconds: Sequence[float]) -> bytes:
    """Return figures of one size as an animated PNG that repeats for ever.

    Args:
        frames: the figures.
        seconds: how long each is shown.
    """
    return _joined([_drawn(figure) for figure in frames], seconds)


def animated_images(images: Iterable[Tensor], seconds: Sequence[float]) -> bytes:
    """Return images (3, H, W) of bytes as an animated PNG that repeats for ever."""
    return _joined([Image.fromarray(each.permute(1, 2, 0).numpy()) for each in images], seconds)


def _drawn(figure: Figure) -> Image.Image:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, facecolor="white")
    return Image.open(buffer).convert("RGB")


def _joined(frames: list[Image.Image], seconds: Sequence[float]) -> bytes:
    buffer = io.BytesIO()
    frames[0].save(
        buffer, format="PNG", save_all=True, append_images=frames[1:], loop=0,
        duration=[round(1000 * each) for each in seconds],
    )  # fmt: skip
    return buffer.getvalue()
