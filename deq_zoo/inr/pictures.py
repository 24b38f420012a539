"""What fields have learnt: pictures beside their targets, waves, and races."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from deq_zoo.drawing import to_png
from deq_zoo.inr.signal import Signal, shown
from deq_zoo.task import Picture

_MAGNIFIED = 4  # errors are hard to see
_FRAMES = 3  # of a video


def compare(
    signal: Signal,
    rows: Tensor,
    values: Mapping[str, Tensor],
    judged: Tensor | None = None,
    note: str = "",
) -> Picture:
    """The target beside every fit, and below each fit its error.

    Args:
        signal: an image or video.
        rows: the samples that are shown, whole pictures.
        values: (N, c) of each field at them.
        judged: the samples by which PSNR is told; all by default.
        note: ends the caption.
    """
    pictures = rows.view(-1, *signal.shape[-2:])
    frames = range(0, len(pictures), max(1, -(-len(pictures) // _FRAMES)))
    wanted = shown(signal.targets(rows)).view(*pictures.shape, -1)
    alone = len(values) == 1  # then its error is shown beside it
    lines, columns = (1, 3) if alone else (2, 1 + len(values))
    tall = 3.6 * signal.shape[-2] / signal.shape[-1] + 0.4
    figure = Figure(figsize=(3.6 * columns, tall * lines * len(frames)), layout="constrained")
    grid = figure.subplots(lines * len(frames), columns, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for line, frame in zip(range(0, lines * len(frames), lines), frames, strict=True):
        title = "target" if signal.kind == "image" else f"picture {frame + 1} of {len(pictures)}"
        _show(grid[line, 0], wanted[frame], title)
        for column, (name, held) in enumerate(values.items(), start=1):
            fit = shown(held).view(*pictures.shape, -1)[frame]
            told = f"{name}\n{_psnr(signal, rows, held, judged):.2f} dB"
            _show(grid[line, column], fit, told if not line else "")
            error = (_MAGNIFIED * (fit - wanted[frame]).abs()).clamp(0, 1)
            below = grid[line, column + 1] if alone else grid[line + 1, column]
            _show(below, error, f"error, {_MAGNIFIED} times")
    caption = "The signal, what the field makes of it, and the difference."
    if judged is not None:
        caption += " Every fourth pixel was learnt; PSNR is that of those diagonally between."
    return Picture("fit", f"{caption} {note}".rstrip(), to_png(figure))


def race(course: Tensor, names: Sequence[str]) -> Picture:
    """PSNR of two fields, by their own processor seconds and by step.

    Args:
        course: (n, 4) seconds of both, PSNR of both, evenly spaced in steps.
        names: of the two.
    """
    figure = Figure(figsize=(9.0, 3.2), layout="constrained")
    by_time, by_step = figure.subplots(1, 2, sharey=True)
    told, share = course.numpy(), np.linspace(0, 1, len(course))
    for k, name in enumerate(names):
        by_time.plot(told[:, k], told[:, 2 + k], label=name, linewidth=1.6)
        by_step.plot(share, told[:, 2 + k], linewidth=1.6)
    by_time.set(xlabel="processor seconds of its own", ylabel="PSNR on held-out pixels, dB")
    by_step.set(xlabel="share of the steps")
    for axes in (by_time, by_step):
        axes.grid(alpha=0.3)
    by_time.legend(frameon=False, fontsize=8)
    caption = "Held-out pixels, at equal time (left) and at equal steps (right)."
    return Picture("race", caption, to_png(figure))


def unrolled(signal: Signal, values: Tensor) -> Picture:
    """A sound with its fit: all of it, its error, and the middle from near."""
    wanted, fit = signal.values[:, 0].float().numpy(), values[:, 0].numpy()
    rate = signal.rate or 1.0
    seconds = np.arange(len(wanted)) / rate
    figure = Figure(figsize=(9.0, 5.4), layout="constrained")
    above, middle, below = figure.subplots(3, 1)
    gap = max(1, len(wanted) // 20_000)
    above.plot(seconds[::gap], wanted[::gap], linewidth=0.4, label="target")
    above.plot(seconds[::gap], fit[::gap], linewidth=0.4, alpha=0.7, label="fit")
    above.set_ylabel("amplitude")
    above.legend(frameon=False, fontsize=8, loc="upper right")
    middle.plot(seconds[::gap], (fit - wanted)[::gap], linewidth=0.4, color="crimson")
    middle.set_ylabel("error")
    near = slice(len(wanted) // 2, len(wanted) // 2 + 400)
    below.plot(seconds[near], wanted[near], linewidth=1.4)
    below.plot(seconds[near], fit[near], linewidth=1.2, linestyle="--")
    below.set(xlabel="seconds", ylabel="from near")
    for axes in (above, middle, below):
        axes.grid(alpha=0.3)
    return Picture(
        "fit", "The sound, what the field makes of it, and the difference.", to_png(figure)
    )


def _show(axes: Any, pixels: Tensor, title: str) -> None:
    shown = pixels[..., 0] if pixels.shape[-1] == 1 else pixels
    axes.imshow(shown.numpy(), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    axes.set_title(title, fontsize=9)


def _psnr(signal: Signal, rows: Tensor, values: Tensor, judged: Tensor | None) -> float:
    errors = signal.squared_errors(values, rows)
    return signal.psnr(errors if judged is None else errors[judged])


def contours(fit: Tensor, wanted: Tensor) -> Picture:
    """A signed distance and its fit on a square, as level lines."""
    figure = Figure(figsize=(7.6, 3.6), layout="constrained")
    reach = float(wanted.abs().max())
    levels, axis = np.linspace(-reach, reach, 21), np.linspace(-1, 1, len(wanted))
    for axes, held, title in zip(
        figure.subplots(1, 2), (wanted.numpy(), fit.numpy()), ("target", "fit"), strict=True
    ):
        axes.contourf(axis, axis, held, levels, cmap="RdBu", extend="both")
        axes.contour(axis, axis, held, [0.0], colors="black", linewidths=1.6)
        axes.set_aspect("equal")
        axes.set_axis_off()
        axes.set_title(title, fontsize=9)
    caption = "Signed distance, red inside; the black line is the shape."
    return Picture("distance", caption, to_png(figure))
