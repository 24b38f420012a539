"""Options of a rendering: at which resolution, and which part of a signal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, prod
from typing import TYPE_CHECKING

from deq_zoo.errors import ZooError
from deq_zoo.inr.signal import NAMES

if TYPE_CHECKING:
    from deq_zoo.inr.representation import Representation

_MOST = 1 << 28  # samples of a rendering: 3 GB of colours


@dataclass(frozen=True)
class Rendering:
    """Options of a rendering.

    Args:
        scale: multiplies the samples along every axis of a picture, or of a sound.
        size: samples along every axis instead, e.g. 512,768; for a video, frames first.
        region: the part to render, as shares of the whole: the starts along every axis, then the
            ends; 0.25,0.25,0.75,0.75 is the middle of an image, 0,0.5 the first half of a sound.
        rate: samples or frames per second; 0 keeps the signal's.
        format: of the file: png, wav, mp4 or gif.
    """

    scale: float = 1.0
    size: tuple[int, ...] = ()
    region: tuple[float, ...] = ()
    rate: float = 0.0
    format: str = ""


def choose_shape(model: Representation, options: Rendering) -> tuple[int, ...]:
    """Return the samples of a rendering along every axis."""
    d, what = model.field.d, NAMES[model.kind]
    _check(model, options)
    if options.size:
        if len(options.size) != d or min(options.size) < 1:
            raise ZooError(f"--size takes {d} positive numbers for {what}: {options.size}")
        sizes: list[float] = list(options.size)
    else:
        region = check_region(options.region, d)
        times = [options.scale] * d
        if model.kind == "video":
            times[0] = 1.0  # --scale adds pixels; more frames come by --rate
        if options.rate:
            if not model.rate:
                raise no_rate(model)
            times[0] = options.rate / model.rate
        share = [high - low for low, high in zip(region[:d], region[d:], strict=True)]
        sizes = [n * t * s for n, t, s in zip(model.shape, times, share, strict=True)]
    if not prod(sizes) <= _MOST:
        raise ZooError(
            f"{prod(sizes):.3g} samples are more than the {_MOST:,} that are rendered at once: "
            "lower --scale, --size or --rate, or choose a --region"
        )
    return tuple(max(1, round(n)) for n in sizes)


def choose_rate(model: Representation, options: Rendering) -> float:
    """Return the rate of the file: a sound with more samples plays as long as before."""
    rate = options.rate or model.rate
    if model.kind == "audio" and not rate:
        raise no_rate(model)
    return rate if options.rate or model.kind != "audio" else rate * options.scale


def check_region(region: Sequence[float], d: int) -> Sequence[float]:
    """Return a region of d axes, the whole by default; raise `ZooError` for another."""
    if not region:
        return [0.0] * d + [1.0] * d
    inside = len(region) == 2 * d and all(0 <= share <= 1 for share in region)
    if not inside or not all(a < b for a, b in zip(region[:d], region[d:], strict=True)):
        raise ZooError(
            f"--region takes {d} starts and {d} ends, shares from 0 to 1: {tuple(region)}"
        )
    return region


def no_rate(model: Representation) -> ZooError:
    """Return the error about a signal without a rate."""
    noun = NAMES[model.kind].split()[-1]
    return ZooError(
        f"the {noun} has no rate: give one when it is fitted, Signal({model.kind!r}, values, "
        "rate), or give --size and --rate"
    )


def _check(model: Representation, options: Rendering) -> None:
    """Raise `ZooError` for options without a meaning, or that contradict each other."""
    if not 0 < options.scale < inf or not 0 <= options.rate < inf:
        raise ZooError(
            f"--scale and --rate must be positive and finite, got {options.scale} and "
            f"{options.rate}"
        )
    if options.rate and model.kind == "image":
        raise ZooError("an image has no rate: drop --rate")
    if options.size and options.scale != 1:
        raise ZooError("--size and --scale both set the number of samples: drop one of them")
    if options.rate and options.scale != 1 and model.kind == "audio":
        raise ZooError(
            "--rate and --scale both set the number of samples of a sound: drop one of them"
        )
