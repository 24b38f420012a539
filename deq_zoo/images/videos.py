"""The frames of a video file."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from deq_zoo.errors import DataError
from deq_zoo.packages import optional

_RATE = 25.0  # of a video that says none


class VideoFrame(NamedTuple):
    """A frame, (H, W, 3) unsigned bytes, and how many a second the video has."""

    pixels: Tensor
    rate: float


def read_video(path: str | Path) -> Generator[VideoFrame, None, None]:
    """Yield the frames of a video file, decoded one by one."""
    av = optional("av", "video", "videos")
    try:
        with av.open(str(path)) as file:
            stream = file.streams.video[0]
            rate = float(stream.average_rate or _RATE)
            for frame in file.decode(stream):
                yield VideoFrame(torch.from_numpy(frame.to_ndarray(format="rgb24")), rate)
    except (av.error.FFmpegError, IndexError, OSError) as error:
        raise DataError(f"cannot read {path} as a video: {error}") from None
