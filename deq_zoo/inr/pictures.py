"""Pictures of fields: beside their targets, as waves, as distances and in a race."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from deq_zoo.drawing import to_png
from deq_zoo.inr.signal import Signal, to_brightness
from deq_zoo.task import Picture

_MAGNIFIED = 4  # errors are hard to see
_FRAMES = 3  # of a video
_NEAR = 400  # samples of a sound in its close-up


def plot_pictures(
    signal: Signal, rows: Tensor, values: Mapping[str, Tensor], caption: str, scored: Tensor
) -> Picture:
    """Draw an image, or frames of a video, beside every fit with its error.

    Args:
        signal: an image or video.
        rows: the samples of whole pictures.
        values: (N, c) of each field at them, by name.
        caption: sentences about the data and the PSNR.
        scored: (N,) whether each sample counts in the PSNR.
    """
    pictures = rows.view(-1, *signal.shape[-2:])
    frames = range(0, len(pictures), max(1, -(-len(pictures) // _FRAMES)))
    wanted = to_brightness(signal.targets(rows)).view(*pictures.shape, -1)
    alone = len(values) == 1  # its error is beside it, otherwise below
    lines, columns = (1, 3) if alone else (2, 1 + len(values))
    tall = 3.6 * signal.shape[-2] / signal.shape[-1] + 0.4
    figure = Figure(figsize=(3.6 * columns, tall * lines * len(frames)), layout="constrained")
    grid = figure.subplots(lines * len(frames), columns, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for line, frame in zip(range(0, lines * len(frames), lines), frames, strict=True):
        title = "signal" if signal.kind == "image" else f"frame {frame + 1} of {len(pictures)}"
        _show(grid[line, 0], wanted[frame], title)
        for column, (name, fitted) in enumerate(values.items(), start=1):
            fit = to_brightness(fitted).view(*pictures.shape, -1)[frame]
            errors = signal.squared_errors(fitted, rows)[scored]
            _show(grid[line, column], fit, f"{name}\n{signal.psnr(errors):.2f} dB")
            error = (_MAGNIFIED * (fit - wanted[frame]).abs()).clamp(0, 1)
            place = grid[line, column + 1] if alone else grid[line + 1, column]
            _show(place, error, f"absolute error, times {_MAGNIFIED}")
    what = "The signal" if signal.kind == "image" else f"{len(frames)} frames, evenly spread"
    text = f"{what}, the values of the field, and their absolute difference. {caption}"
    return Picture("fit", text, to_png(figure))


def plot_race(
    steps: Tensor, psnr: Tensor, names: Sequence[str], seconds: Sequence[float]
) -> list[Picture]:
    """Draw the validation PSNR of two fields by step and by processor time.

    Args:
        steps: (n,) of the training.
        psnr: (n, 2) on validation pixels.
        names: of the fields.
        seconds: processor time of a training step of each.

    Returns:
        One picture; none with fewer than two entries.
    """
    if len(steps) < 2:
        return []
    figure = Figure(figsize=(9.0, 3.2), layout="constrained")
    by_step, by_time = figure.subplots(1, 2, sharey=True)
    for k, name in enumerate(names):
        y, best = psnr[:, k].cpu().numpy(), int(psnr[:, k].argmax())
        for axes, unit in ((by_step, 1.0), (by_time, seconds[k])):
            x = unit * steps.cpu().numpy()
            axes.plot(x, y, label=name, linewidth=1.6)
            axes.plot(x[best], y[best], "o", color=axes.lines[-1].get_color(), markersize=5)
    by_step.set(xlabel="training step", ylabel="PSNR on validation pixels, dB")
    by_time.set(xlabel="processor time, s")
    for axes in (by_step, by_time):
        axes.grid(alpha=0.3)
    by_step.legend(frameon=False, fontsize=8)
    caption = (
        "PSNR on all validation pixels during training; the dot is the best of each curve. Left: "
        "by step. Right: by processor time, steps times the median time of a training step, "
        "measured when this picture was drawn."
    )
    return [Picture("race", caption, to_png(figure))]


def plot_sound(signal: Signal, values: Tensor, source: str) -> Picture:
    """Draw a sound with its fit: all of it, its error, and a close-up of the middle.

    Args:
        signal: the sound.
        values: (n, 1) of the field.
        source: the name of the data.
    """
    wanted, fit = signal.values[:, 0].float().numpy(), values[:, 0].numpy()
    rate = signal.rate or 1.0
    time = np.arange(len(wanted)) / rate
    figure = Figure(figsize=(9.0, 5.4), layout="constrained")
    above, middle, below = figure.subplots(3, 1)
    gap = max(1, len(wanted) // 20_000)
    above.plot(time[::gap], wanted[::gap], linewidth=0.4, label="signal")
    above.plot(time[::gap], fit[::gap], linewidth=0.4, alpha=0.7, label="fit")
    above.set_ylabel("amplitude")
    above.legend(frameon=False, fontsize=8, loc="upper right")
    middle.plot(time[::gap], (fit - wanted)[::gap], linewidth=0.4, color="crimson")
    middle.set_ylabel("error")
    near = slice(len(wanted) // 2, len(wanted) // 2 + _NEAR)
    below.plot(time[near], wanted[near], linewidth=1.4)
    below.plot(time[near], fit[near], linewidth=1.2, linestyle="--")
    below.set(xlabel="time, s" if signal.rate else "sample", ylabel="amplitude")
    for axes in (above, middle, below):
        axes.grid(alpha=0.3)
    psnr = signal.psnr((values[:, 0] - signal.values[:, 0]).square())
    caption = (
        f"The sound and its fit, the error of the fit, and {_NEAR} samples from the middle. "
        f"Data: {source}. The field has learnt all samples; their PSNR, with a peak of 1, is "
        f"{psnr:.2f} dB."
    )
    return Picture("fit", caption, to_png(figure))


def plot_distance(fit: Tensor, wanted: Tensor, plane: str) -> Picture:
    """Draw a signed distance and its fit on a square from -1 to 1, as level lines.

    Args:
        fit: (n, n) values of the field.
        wanted: (n, n) the right distances.
        plane: what the square is, for the caption.
    """
    figure = Figure(figsize=(8.4, 3.6), layout="constrained")
    reach = float(wanted.abs().max())
    levels, axis = np.linspace(-reach, reach, 21), np.linspace(-1, 1, len(wanted))
    grid = figure.subplots(1, 2, sharey=True)
    for axes, values, title in zip(grid, (wanted, fit), ("exact", "fit"), strict=True):
        filled = axes.contourf(axis, axis, values.numpy(), levels, cmap="RdBu", extend="both")
        axes.contour(axis, axis, values.numpy(), [0.0], colors="black", linewidths=1.6)
        axes.set_aspect("equal")
        axes.set(title=title, xlabel="x")
    grid[0].set_ylabel("y")
    figure.colorbar(filled, ax=grid, label="signed distance")
    caption = f"Signed distance {plane}, negative inside; the black line is the shape."
    return Picture("distance", caption, to_png(figure))


def _show(axes: Any, pixels: Tensor, title: str) -> None:
    pixels = pixels[..., 0] if pixels.shape[-1] == 1 else pixels
    axes.imshow(pixels.numpy(), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    axes.set_title(title, fontsize=9)
