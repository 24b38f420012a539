"""Encoding signals as files: png, wav, mp4 and gif."""

from __future__ import annotations

from fractions import Fraction
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from deq_zoo.files import write_atomically
from deq_zoo.inr.signal import DIMENSIONS, NAMES, Kind, to_brightness
from deq_zoo.packages import optional

SUFFIXES: dict[Kind, tuple[str, ...]] = {
    "image": (".png",),
    "audio": (".wav",),
    "video": (".mp4", ".gif"),
}
_FASTEST = 1 << 31  # rate of a wav file, whose header has 4 bytes for bytes per second


def write_signal(path: str | Path, values: Tensor, rate: float = 0.0) -> None:
    """Write values of a field to a file, in the format that its name ends in.

    Args:
        path: ends in .png, .wav, .mp4 or .gif; a file of that name is replaced.
        values: (H, W, c), (T, H, W, c) or (n, 1), from -1 to 1.
        rate: samples or frames per second; a sound needs it.
    """
    path = Path(path)
    write_atomically(path, encode_signal(path.name, values, rate))


def encode_signal(name: str, values: Tensor, rate: float = 0.0) -> bytes:
    """Return the content of a file of values, in the format that its name ends in.

    Args: see `write_signal`.
    """
    suffix = Path(name).suffix.lower()
    kind = next((kind for kind, suffixes in SUFFIXES.items() if suffix in suffixes), None)
    if kind is None:
        endings = ", ".join(suffix for suffixes in SUFFIXES.values() for suffix in suffixes)
        raise ValueError(f"the name {name} ends in no format that is written; known: {endings}")
    if values.dim() != DIMENSIONS[kind] + 1:
        raise ValueError(
            f"{name} is {NAMES[kind]}, {DIMENSIONS[kind]} axes and channels: got values "
            f"{tuple(values.shape)}"
        )
    if kind == "audio" and not 1 <= rate < _FASTEST:
        fault = f"cannot have the rate {rate:.3g}" if rate else "has no rate"
        raise ValueError(f"the sound {fault}: give one from 1 to {_FASTEST - 1:,} per second")
    values = values.detach().float().cpu()
    if kind == "audio":
        return _encode_sound(values, rate)
    pixels = (to_brightness(values) * 255).round().byte()
    pixels = pixels.expand(*pixels.shape[:-1], 3) if pixels.shape[-1] == 1 else pixels
    if suffix == ".mp4":
        return _encode_video(pixels, rate or 25.0)
    return _encode_pictures(pixels, rate)


def _encode_sound(values: Tensor, rate: float) -> bytes:
    from scipy.io import wavfile

    buffer = BytesIO()
    samples = (values[:, 0].clamp(-1, 1) * 32767).round().short().numpy()
    wavfile.write(buffer, round(rate), samples)
    return buffer.getvalue()


def _encode_pictures(pixels: Tensor, rate: float) -> bytes:
    """Return an image as PNG, a video as GIF."""
    from PIL import Image

    buffer = BytesIO()
    if pixels.dim() == 3:
        Image.fromarray(pixels.contiguous().numpy()).save(buffer, "PNG")
        return buffer.getvalue()
    first, *others = (Image.fromarray(frame.contiguous().numpy()) for frame in pixels)
    pause = round(1000 / rate) if rate else 40
    first.save(buffer, "GIF", save_all=True, append_images=others, duration=pause, loop=0)
    return buffer.getvalue()


def _encode_video(pixels: Tensor, rate: float) -> bytes:
    """Return a video as H.264, whose sides are even: an odd side repeats its last line."""
    av = optional("av", "video", "mp4 files (gif files do not)")
    height, width = pixels.shape[1:3]
    odd = ((0, 0), (0, height % 2), (0, width % 2), (0, 0))
    frames = np.pad(pixels.numpy(), odd, mode="edge")
    buffer = BytesIO()
    with av.open(buffer, mode="w", format="mp4") as out:
        stream: Any = out.add_stream("libx264", rate=Fraction(rate).limit_denominator(1001))
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.options = {"crf": "12"}  # errors of the codec should be smaller than the field's
        for frame in frames:
            image = np.ascontiguousarray(frame)
            for packet in stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")):
                out.mux(packet)
        for packet in stream.encode():
            out.mux(packet)
    return buffer.getvalue()
