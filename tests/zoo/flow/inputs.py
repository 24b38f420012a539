"""Inputs for the predictions of the smoke model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

from deq_zoo.flow.warps import synthetic_video
from tests.zoo.served import as_base64


def write_picture(path: Path, pixels: Tensor) -> Path:
    """Write pixels (3, H, W) of bytes as a picture, with the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(path)
    return path


def write_frames(folder: Path, count: int = 3, size: tuple[int, int] = (66, 70)) -> list[Path]:
    """Write the first frames of a synthetic video as pictures."""
    frames, _ = synthetic_video(count, size)
    return [write_picture(folder / f"frame{k}.png", frame) for k, frame in enumerate(frames)]


def predict_inputs(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return a pair of frames, and a picture that cannot be read."""
    broken = folder / "broken.png"
    broken.parent.mkdir(parents=True, exist_ok=True)
    broken.write_bytes(b"no picture")
    return write_frames(folder, 2), [broken]


def python_input() -> Any:
    """Return a pair for `model.predict`: an array and a tensor."""
    (first, second), _ = synthetic_video(2, (66, 70))
    return first.permute(1, 2, 0).numpy(), second


def served_input() -> tuple[dict[str, Any], Any]:
    """Return a request to a server, and the same for `model.predict`."""
    frames, _ = synthetic_video(2, (66, 70))
    pair = [Image.fromarray(frame.permute(1, 2, 0).numpy()) for frame in frames]
    return {f"image{k}": as_base64(image) for k, image in enumerate(pair, start=1)}, tuple(pair)
