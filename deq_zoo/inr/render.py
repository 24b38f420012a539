"""A field at any resolution, of any part of its signal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf, prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deq_zoo.errors import ZooError
from deq_zoo.inr.blocks import block_size
from deq_zoo.inr.compression import sizes
from deq_zoo.inr.representation import Representation
from deq_zoo.inr.signal import NAMES, Signal, coordinates
from deq_zoo.inr.writers import SUFFIXES, write_signal

_MOST = 1 << 28  # samples of a rendering: 3 GB of colours


@dataclass(frozen=True)
class Rendering:
    """What to render.

    Args:
        scale: times the samples of the signal along every axis of a picture, or of a sound.
        size: samples along every axis instead, e.g. 512,768; of a video frames first.
        region: the part to show as shares of the whole: the starts along every axis, then the
            ends; 0.25,0.25,0.75,0.75 is the middle of an image, 0,0.5 the first half of a sound.
        rate: samples or frames per second; 0 keeps the signal's.
        format: of the file: png, wav, mp4 or gif.
    """

    scale: float = 1.0
    size: tuple[int, ...] = ()
    region: tuple[float, ...] = ()
    rate: float = 0.0
    format: str = ""


def render(model: Representation, options: Rendering | None = None, **changes: Any) -> Tensor:
    """Values (..., c) from -1 to 1 on a grid, on the CPU.

    Args:
        model: what was trained.
        options: what to render.
        **changes: the same as keywords, e.g. `render(model, scale=4)`.
    """
    if options is not None and changes:
        raise TypeError(f"give a Rendering or keywords, not both: got {', '.join(changes)} too")
    options = Rendering(**changes) if options is None else options
    shape = _shape(model, options)
    region = _region(options.region, len(shape))
    return _values(model, torch.arange(prod(shape)), shape, region).view(*shape, -1)


@torch.no_grad()
def _values(
    model: Representation, rows: Tensor, shape: Sequence[int], region: Sequence[float] = ()
) -> Tensor:
    """Values (N, c) at some samples of a grid, block by block, on the CPU."""
    like = next(model.parameters())
    width = getattr(getattr(model.field, "config", None), "width", 1024)
    parts, training = [], model.training
    model.eval()
    try:
        for part in rows.split(block_size(width)):
            x = coordinates(shape, part.to(like.device), like.dtype, region)
            parts.append(model(x).values[-1].float().cpu())
    finally:
        model.train(training)
    return torch.cat(parts)


def write_rendering(
    model: Representation, options: Rendering, out: Path, signal: Signal | None
) -> Iterator[str]:
    """Render into a file of a folder; what it yields is told.

    Args:
        model: what was trained.
        options: what to render.
        out: the folder.
        signal: the original, if it is at hand, to say how much compression costs.
    """
    suffixes = SUFFIXES[model.kind]
    suffix = f".{options.format.lower().lstrip('.')}" if options.format else suffixes[0]
    what = NAMES[model.kind]
    if suffix not in suffixes:
        raise ZooError(f"{what} is written as {' or '.join(suffixes)}, not as {suffix}")
    rate = _rate(model, options)
    if model.kind == "audio" and not rate:
        raise _no_rate(model)
    values = render(model, options)
    path = out / f"{model.kind}{suffix}"
    try:
        write_signal(path, values, rate)
    except ValueError as error:
        raise ZooError(str(error)) from None
    yield f"{path}: {' x '.join(map(str, values.shape[:-1]))} samples"
    own = tuple(model.frame[1:].tolist())
    whole = values.shape[:-1] == own and not options.region
    yield from sizes(
        model,
        lambda model, rows: _values(model, rows, own),
        signal if signal is not None and signal.shape == own else None,
        values.flatten(0, -2) if whole else None,
    )


def _shape(model: Representation, options: Rendering) -> tuple[int, ...]:
    """Samples along every axis."""
    d, what = model.field.d, NAMES[model.kind]
    _check(model, options)
    if options.size:
        if len(options.size) != d or min(options.size) < 1:
            raise ZooError(f"--size takes {d} positive numbers for {what}: {options.size}")
        sizes: list[float] = list(options.size)
    else:
        region = _region(options.region, d)
        times = [options.scale] * d
        if model.kind == "video":
            times[0] = 1.0  # more pixels are not more frames: those come by --rate
        if options.rate:
            if not model.rate:
                raise _no_rate(model)
            times[0] = options.rate / model.rate
        share = [high - low for low, high in zip(region[:d], region[d:], strict=True)]
        sizes = [n * t * s for n, t, s in zip(model.shape, times, share, strict=True)]
    if not prod(sizes) <= _MOST:
        raise ZooError(
            f"{prod(sizes):.3g} samples are more than the {_MOST:,} that are rendered at once: "
            "lower --scale, --size or --rate, or choose a --region"
        )
    return tuple(max(1, round(n)) for n in sizes)


def _no_rate(model: Representation) -> ZooError:
    noun = NAMES[model.kind].split()[-1]
    return ZooError(
        f"the {noun} has no rate: give one when it is fitted, Signal({model.kind!r}, values, "
        "rate), or say --size and --rate"
    )


def _check(model: Representation, options: Rendering) -> None:
    """Options that mean nothing, or contradict each other."""
    if not 0 < options.scale < inf or not 0 <= options.rate < inf:
        raise ZooError(
            f"--scale and --rate must be positive and finite, got {options.scale} and "
            f"{options.rate}"
        )
    if options.rate and model.kind == "image":
        raise ZooError("an image has no rate: drop --rate")
    if options.size and options.scale != 1:
        raise ZooError("--size and --scale both say how many samples: drop one of them")
    if options.rate and options.scale != 1 and model.kind == "audio":
        raise ZooError("--rate and --scale both say how many samples of a sound: drop one of them")


def _region(region: Sequence[float], d: int) -> Sequence[float]:
    if not region:
        return [0.0] * d + [1.0] * d
    inside = len(region) == 2 * d and all(0 <= share <= 1 for share in region)
    if not inside or not all(a < b for a, b in zip(region[:d], region[d:], strict=True)):
        raise ZooError(
            f"--region takes {d} starts and {d} ends, shares from 0 to 1: {tuple(region)}"
        )
    return region


def _rate(model: Representation, options: Rendering) -> float:
    """Of the file: a sound with more samples plays as long as before."""
    if options.rate or model.kind != "audio":
        return options.rate or model.rate
    return model.rate * options.scale
