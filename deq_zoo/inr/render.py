"""A field at any resolution, of any part of its signal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deq_zoo.errors import ZooError
from deq_zoo.inr.blocks import block_size
from deq_zoo.inr.compression import sizes
from deq_zoo.inr.representation import Representation
from deq_zoo.inr.signal import Signal, coordinates
from deq_zoo.inr.writers import SUFFIXES, write_signal


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


@torch.no_grad()
def render(model: Representation, options: Rendering | None = None, **changes: Any) -> Tensor:
    """Values (..., c) from -1 to 1 on a grid, on the CPU.

    Args:
        model: what was trained.
        options: what to render.
        **changes: the same as keywords, e.g. ``render(model, scale=4)``.
    """
    options = Rendering(**changes) if options is None else options
    like = next(model.parameters())
    shape = _shape(model, options)
    region = _region(options.region, len(shape))
    width = getattr(getattr(model.field, "config", None), "width", 1024)
    parts, training = [], model.training
    model.eval()
    try:
        for rows in torch.arange(prod(shape), device=like.device).split(block_size(width)):
            x = coordinates(shape, rows, like.dtype, region)
            parts.append(model(x).values[-1].float().cpu())
    finally:
        model.train(training)
    return torch.cat(parts).view(*shape, -1)


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
    suffix = f".{options.format.lstrip('.')}" if options.format else suffixes[0]
    if suffix not in suffixes:
        raise ZooError(f"an {model.kind} is written as {' or '.join(suffixes)}, not as {suffix}")
    values = render(model, options)
    path = out / f"{model.kind}{suffix}"
    write_signal(path, values, _rate(model, options))
    yield f"{path}: {' x '.join(map(str, values.shape[:-1]))} samples"
    yield from sizes(model, render, signal)


def _shape(model: Representation, options: Rendering) -> tuple[int, ...]:
    """Samples along every axis."""
    d = model.field.d
    if options.size:
        if len(options.size) != d or min(options.size) < 1:
            raise ZooError(f"--size takes {d} positive numbers for an {model.kind}: {options.size}")
        return options.size
    if not options.scale > 0 or options.rate < 0:
        raise ZooError("--scale and --rate must be positive")
    region = _region(options.region, d)
    shape = list(model.shape)
    times = [options.scale] * d
    if model.kind == "video":
        times[0] = 1.0  # more pixels are not more frames: those come by --rate
    if options.rate and model.kind != "image":
        times[0] = options.rate / model.rate
    share = [high - low for low, high in zip(region[:d], region[d:], strict=True)]
    return tuple(max(1, round(n * t * s)) for n, t, s in zip(shape, times, share, strict=True))


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
