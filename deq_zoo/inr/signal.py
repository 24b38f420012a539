"""Signals on a grid: coordinates, targets and PSNR of images, videos and sounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, log10, prod
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["audio", "image", "video"]
#: Coordinates of a point, which also tell the kinds apart.
DIMENSIONS: dict[str, int] = {"audio": 1, "image": 2, "video": 3}
#: How a message calls each kind.
NAMES: dict[str, str] = {"audio": "a sound", "image": "an image", "video": "a video"}
_CHANNELS: dict[str, tuple[int, ...]] = {"audio": (1,), "image": (1, 3), "video": (3,)}
_ROUNDING = 1e-3  # by which brightness may leave its range


@dataclass(frozen=True)
class Signal:
    """A sampled signal.

    Args:
        kind: of signal.
        values: image (H, W, 1 or 3) and video (T, H, W, 3) as bytes or numbers from 0 to 1; audio
            (n, 1) as numbers from -1 to 1.
        rate: samples or frames per second; 0 for an image.
    """

    kind: Kind
    values: Tensor
    rate: float = 0.0

    def __post_init__(self) -> None:
        d, values, what = DIMENSIONS[self.kind], self.values, f"the values of {NAMES[self.kind]}"
        if values.dim() != d + 1 or not values.numel():
            raise ValueError(
                f"{what} must have {d} axes and channels, and not be empty: "
                f"got {tuple(values.shape)}"
            )
        known = _CHANNELS[self.kind]
        if values.shape[-1] not in known:
            raise ValueError(
                f"{what} must have {' or '.join(map(str, known))} channels on the last axis, got "
                f"{tuple(values.shape)}: a sound is (n, 1), an image (H, W, 1) or (H, W, 3), a "
                "video (T, H, W, 3)"
            )
        if values.dtype == torch.uint8 and self.kind != "audio":
            return
        if not values.is_floating_point():
            bytes_ = "" if self.kind == "audio" else "bytes (uint8) or "
            raise TypeError(f"{what} must be {bytes_}floating point, got {values.dtype}")
        low, high = (float(t) for t in values.detach().aminmax())  # NaN if one of them is
        if not isfinite(high - low):
            raise ValueError(f"{what} must be finite, got numbers from {low} to {high}")
        if self.kind != "audio" and (low < -_ROUNDING or high > 1 + _ROUNDING):
            raise ValueError(
                f"{what} must be bytes or numbers from 0 to 1, got {low:.4g} to {high:.4g}: shift "
                "and divide them"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Samples along each axis."""
        return tuple(self.values.shape[:-1])

    @property
    def channels(self) -> int:
        return self.values.shape[-1]

    def __len__(self) -> int:
        return prod(self.shape)

    def targets(self, rows: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """What a field should say at some samples, (N, c): from -1 to 1."""
        held = self.values.reshape(-1, self.channels)
        picked = held[rows.to(held.device)].to(rows.device)
        if self.kind == "audio":
            return picked.to(dtype)
        top = 1.0 if picked.is_floating_point() else 255.0
        return picked.to(dtype) * (2 / top) - 1

    def squared_errors(self, values: Tensor, rows: Tensor) -> Tensor:
        """(N,) mean over channels, of samples as they are shown: images clipped, from 0 to 1."""
        wanted = self.targets(rows, values.dtype)
        if self.kind == "audio":
            return (values - wanted).square().mean(-1)
        return (shown(values) - shown(wanted)).square().mean(-1)

    def psnr(self, errors: Tensor) -> float:
        """In dB, from the squared errors of samples; of a video the mean over its frames.

        A video's errors must be those of whole frames, in order.
        """
        if self.kind != "video":
            return decibel(float(errors.double().mean()))
        frames = errors.double().view(-1, prod(self.shape[1:])).mean(1).tolist()
        return sum(map(decibel, frames)) / len(frames)


def coordinates(
    shape: Sequence[int],
    rows: Tensor,
    dtype: torch.dtype = torch.float32,
    region: Sequence[float] = (),
) -> Tensor:
    """Where samples of a grid lie, (N, d): from -1 to 1 along every axis, both ends included.

    Rows count through the grid with its last axis fastest. A point of an image is (column, row),
    of a video (time, row, column), of a sound (time,).

    Args:
        shape: of the grid.
        rows: which samples.
        dtype: of the coordinates.
        region: the part that the grid covers, as shares of the whole: starts along every axis, then
            ends.
    """
    d = len(shape)
    starts, ends = region[:d] or [0.0] * d, region[d:] or [1.0] * d
    places = torch.unravel_index(rows, tuple(shape))
    along = []
    for n, start, end, place in zip(shape, starts, ends, places, strict=True):
        axis = torch.linspace(2 * start - 1, 2 * end - 1, n, dtype=dtype, device=rows.device)
        along.append(axis[place])
    return torch.stack(along[::-1] if d == 2 else along, dim=-1)


def shown(values: Tensor) -> Tensor:
    """Values from -1 to 1 as brightness from 0 to 1."""
    return ((values + 1) / 2).clamp(0, 1)


def psnr(a: Tensor, b: Tensor) -> float:
    """Peak signal-to-noise ratio in dB, for a peak of 1."""
    return decibel(float((a - b).double().square().mean()))


def decibel(error: float) -> float:
    """The ratio of a peak of 1 to a mean squared error; 200 dB stand for none."""
    return -10 * log10(max(error, 1e-20))
