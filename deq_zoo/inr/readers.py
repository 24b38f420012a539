"""Reading signals from files: images by Pillow, sounds by SciPy, videos by PyAV."""

from __future__ import annotations

import struct
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from deq_zoo.errors import DataError
from deq_zoo.images import videos
from deq_zoo.images.files import open_image
from deq_zoo.inr.signal import Kind, Signal

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp", ".ppm")
AUDIO = (".wav",)
VIDEOS = (".mp4", ".mov", ".mkv", ".avi", ".webm", ".gif")


def kind_of(path: Path) -> Kind:
    """Return the kind of signal in a file, by the ending of its name."""
    for kind, suffixes in (("image", IMAGES), ("audio", AUDIO), ("video", VIDEOS)):
        if path.suffix.lower() in suffixes:
            return kind  # type: ignore[return-value]
    endings = ", ".join((*IMAGES, *AUDIO, *VIDEOS))
    raise DataError(f"{path.name} is no image, sound or video by its name; known: {endings}")


def read_signal(path: Path, channels: int = 3, length: int = 0) -> Signal:
    """Return the signal in a file.

    Args:
        path: the file.
        channels: 3, or 1 for grey, for images.
        length: decode only so many frames of a video; 0 decodes all.
    """
    kind = kind_of(path)
    if not path.is_file():
        raise DataError(f"there is no file {path}")
    if kind == "image":
        return Signal("image", read_image(path, channels))
    if kind == "audio":
        return read_wav(path)
    return read_video(path, length)


def read_image(path: Path, channels: int = 3) -> Tensor:
    """Return the pixels (H, W, channels) of an image as bytes, upright.

    Transparent parts show a white ground. Grey of 16 bits is divided by 257; grey in floating point
    must lie from 0 to 1.
    """
    pixels = np.array(open_image(path).convert("RGB" if channels == 3 else "L"))
    return torch.from_numpy(pixels).view(*pixels.shape[:2], channels)


def read_wav(path: Path) -> Signal:
    """Return a sound as one channel, divided by its largest magnitude."""
    from scipy.io import wavfile

    try:
        rate, content = wavfile.read(path)
    except (OSError, ValueError, EOFError, struct.error) as error:
        raise DataError(f"{path} cannot be read as a wav file: {error}") from None
    samples = torch.from_numpy(np.array(content, dtype=np.float32))
    if content.dtype == np.uint8:
        samples -= 128  # silence
    if samples.dim() == 2:
        samples = samples.mean(1)
    if not len(samples):
        raise DataError(f"{path} holds no samples")
    top = samples.abs().max()
    if not top.isfinite():
        raise DataError(f"{path} holds samples that are NaN or infinite")
    return Signal("audio", (samples / top if top > 0 else samples)[:, None], float(rate))


def read_video(path: Path, length: int = 0) -> Signal:
    """Return the first `length` frames of a video as bytes; 0 reads all."""
    frames = list(islice(videos.read_video(path), length or None))
    if not frames:
        raise DataError(f"{path} holds no frames")
    return Signal("video", torch.stack([frame.pixels for frame in frames]), frames[0].rate)
