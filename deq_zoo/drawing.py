"""Plots of named lines, as pictures of a report."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import NamedTuple

from deq_zoo.task import Picture
from torchdeq.plots import new_axes, to_png

__all__ = ["Line", "line_plot", "new_axes", "to_png"]


class Line(NamedTuple):
    """A named line of a plot."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    dashed: bool = False


def line_plot(
    name: str,
    caption: str,
    lines: Sequence[Line],
    xlabel: str,
    ylabel: str,
    log: bool = False,
) -> list[Picture]:
    """Return a plot of the lines that have two finite points at least; none if there is no such.

    Args:
        name: of the picture's file.
        caption: says what is shown.
        lines: the curves; values that are None or not finite are gaps.
        xlabel: name and unit of x.
        ylabel: name and unit of y.
        log: use a logarithmic axis if every value is positive.
    """
    shown = [line for line in map(_finite, lines) if len(line.x) > 1]
    if not shown:
        return []
    figure, axes = new_axes()
    for line in shown:
        axes.plot(
            line.x,
            line.y,
            label=line.label,
            linewidth=1.6,
            linestyle="--" if line.dashed else "-",
            marker="." if len(line.x) < 30 and not line.dashed else None,
        )
    positive = all(value > 0 for line in shown for value in line.y)
    axes.set(xlabel=xlabel, ylabel=ylabel, yscale="log" if log and positive else "linear")
    if len(shown) > 1:
        axes.legend(frameon=False, fontsize=8)
    return [Picture(name, caption, to_png(figure))]


def _finite(line: Line) -> Line:
    points = [(x, y) for x, y in zip(line.x, line.y, strict=True) if y is not None and isfinite(y)]
    return line._replace(x=[x for x, _ in points], y=[y for _, y in points])
