"""Signals as files: png, wav, mp4 and gif."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from deq_zoo.inr.signal import DIMENSIONS, NAMES, Kind, shown
from deq_zoo.packages import optional

SUFFIXES: dict[Kind, tuple[str, ...]] = {
    "image": (".png",),
    "audio": (".wav",),
    "video": (".mp4", ".gif"),
}
_FASTEST = 1 << 31  # rate of a wav file, whose header has 4 bytes for bytes per second


def write_signal(path: str | Path, values: Tensor, rate: float = 0.0) -> None:
    """Write values of a field, shaped as its grid: the file's name says as what.

    Args:
        path: ends in .png, .wav, .mp4 or .gif.
        values: (H, W, c), (T, H, W, c) or (n, 1), from -1 to 1.
        rate: samples or frames per second; a sound needs it.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    kind = next((kind for kind, suffixes in SUFFIXES.items() if suffix in suffixes), None)
    if kind is None:
        known = ", ".join(suffix for suffixes in SUFFIXES.values() for suffix in suffixes)
        raise ValueError(f"{path.name} says no format by its name; known: {known}")
    if values.dim() != DIMENSIONS[kind] + 1:
        raise ValueError(
            f"{path.name} is {NAMES[kind]}, {DIMENSIONS[kind]} axes and channels: got values "
            f"{tuple(values.shape)}"
        )
    if kind == "audio" and not 1 <= rate < _FASTEST:
        fault = f"cannot have the rate {rate:.3g}" if rate else "has no rate"
        raise ValueError(f"the sound {fault}: give one from 1 to {_FASTEST - 1:,} per second")
    path.parent.mkdir(parents=True, exist_ok=True)
    values = values.detach().float().cpu()
    if kind == "audio":
        from scipy.io import wavfile

        samples = (values[:, 0].clamp(-1, 1) * 32767).round().short().numpy()
        wavfile.write(path, round(rate), samples)
        return
    pixels = (shown(values) * 255).round().byte()
    pixels = pixels.expand(*pixels.shape[:-1], 3) if pixels.shape[-1] == 1 else pixels
    if kind == "image":
        _image(pixels).save(path)
    elif suffix == ".gif":
        first, *others = (_image(frame) for frame in pixels)
        pause = round(1000 / rate) if rate else 40
        first.save(path, save_all=True, append_images=others, duration=pause, loop=0)
    else:
        _write_video(path, pixels, rate or 25.0)


def _image(pixels: Tensor) -> Any:
    from PIL import Image

    return Image.fromarray(pixels.contiguous().numpy())


def _write_video(path: Path, pixels: Tensor, rate: float) -> None:
    """H.264, whose sides are even: an odd one repeats its last line."""
    av = optional("av", "video", "mp4 files (gif files do not)")
    height, width = pixels.shape[1:3]
    odd = ((0, 0), (0, height % 2), (0, width % 2), (0, 0))
    frames = np.pad(pixels.numpy(), odd, mode="edge")
    with av.open(str(path), mode="w") as out:
        stream: Any = out.add_stream("libx264", rate=Fraction(rate).limit_denominator(1001))
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.options = {"crf": "12"}  # what the field says should be seen, not the codec
        for frame in frames:
            image = np.ascontiguousarray(frame)
            for packet in stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")):
                out.mux(packet)
        for packet in stream.encode():
            out.mux(packet)
