"""Images, videos and sounds sampled on a grid: coordinates, targets and PSNR."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, log10, prod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

Kind = Literal["audio", "image", "video"]
#: Coordinates of a point; the kinds differ in them.
DIMENSIONS: dict[str, int] = {"audio": 1, "image": 2, "video": 3}
#: Each kind with its article, for messages.
NAMES: dict[str, str] = {"audio": "a sound", "image": "an image", "video": "a video"}
_CHANNELS: dict[str, tuple[int, ...]] = {"audio": (1,), "image": (1, 3), "video": (3,)}
_ROUNDING = 1e-3  # brightness may leave its range by so much


class Grid(NamedTuple):
    """The samples along each axis of a signal, and how many of them make a second.

    Args:
        shape: (n,), (H, W) or (T, H, W).
        rate: samples or frames per second; 0 for an image, or if it is unknown.
    """

    shape: tuple[int, ...]
    rate: float = 0.0

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> Grid | None:
        """Return the grid in the facts of a checkpoint; None if they do not have it."""
        return cls(tuple(facts["shape"]), float(facts["rate"])) if "shape" in facts else None

    def facts(self) -> dict[str, Any]:
        """Return the grid as facts for a checkpoint."""
        return {"shape": list(self.shape), "rate": self.rate}


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
        allowed = _CHANNELS[self.kind]
        if values.shape[-1] not in allowed:
            raise ValueError(
                f"{what} must have {' or '.join(map(str, allowed))} channels on the last axis, got "
                f"{tuple(values.shape)}: a sound is (n, 1), an image (H, W, 1) or (H, W, 3), a "
                "video (T, H, W, 3)"
            )
        if values.dtype == torch.uint8 and self.kind != "audio":
            return
        if not values.is_floating_point():
            bytes_ = "" if self.kind == "audio" else "bytes (uint8) or "
            raise TypeError(f"{what} must be {bytes_}floating point, got {values.dtype}")
        low, high = (float(t) for t in values.detach().aminmax())  # both are NaN if one value is
        if not isfinite(high - low):
            raise ValueError(f"{what} must be finite, got numbers from {low} to {high}")
        if self.kind != "audio" and (low < -_ROUNDING or high > 1 + _ROUNDING):
            raise ValueError(
                f"{what} must be bytes or numbers from 0 to 1, got {low:.4g} to {high:.4g}: shift "
                "and divide them"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the number of samples along each axis."""
        return tuple(self.values.shape[:-1])

    @property
    def grid(self) -> Grid:
        """Return shape and rate."""
        return Grid(self.shape, self.rate)

    @property
    def channels(self) -> int:
        """Return how many numbers a sample has."""
        return self.values.shape[-1]

    def __len__(self) -> int:
        """Return the number of samples."""
        return prod(self.shape)

    def targets(self, rows: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the right values (N, c) at some samples, from -1 to 1."""
        samples = self.values.reshape(-1, self.channels)
        picked = samples[rows.to(samples.device)].to(rows.device)
        if self.kind == "audio":
            return picked.to(dtype)
        top = 1.0 if picked.is_floating_point() else 255.0
        return picked.to(dtype) * (2 / top) - 1

    def squared_errors(self, values: Tensor, rows: Tensor) -> Tensor:
        """Return (N,) squared errors of values (N, c), as means over channels.

        Pictures are compared as brightness from 0 to 1, clipped; sounds as they are.
        """
        wanted = self.targets(rows, values.dtype)
        if self.kind == "audio":
            return (values - wanted).square().mean(-1)
        return (to_brightness(values) - to_brightness(wanted)).square().mean(-1)

    def psnr(self, errors: Tensor) -> float:
        """Return the PSNR in dB of squared errors, for a peak of 1.

        That of a video is the mean over frames: its errors must be those of whole frames, in order.
        """
        if self.kind != "video":
            return to_decibel(float(errors.double().mean()))
        frames = errors.double().view(-1, prod(self.shape[1:])).mean(1).tolist()
        return sum(map(to_decibel, frames)) / len(frames)


def coordinates(
    shape: Sequence[int],
    rows: Tensor,
    dtype: torch.dtype = torch.float32,
    region: Sequence[float] = (),
) -> Tensor:
    """Return the coordinates (N, d) of samples of a grid: -1 to 1 along every axis, ends included.

    The last axis of the grid runs fastest through its rows. A point of an image is (column, row),
    of a video (time, row, column), of a sound (time,).

    Args:
        shape: of the grid.
        rows: numbers of samples.
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


def to_brightness(values: Tensor) -> Tensor:
    """Return values from -1 to 1 as brightness from 0 to 1; values beyond are clipped."""
    return ((values + 1) / 2).clamp(0, 1)


def psnr(a: Tensor, b: Tensor) -> float:
    """Return the peak signal-to-noise ratio in dB, for a peak of 1."""
    return to_decibel(float((a - b).double().square().mean()))


def to_decibel(error: float) -> float:
    """Return a mean squared error as a PSNR with peak 1; an error of zero gives 200 dB."""
    return -10 * log10(max(error, 1e-20))
