"""The answers in pictures: one for solves, one for gradients."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import adjoint
from benchmarks.adjoint import Adjoint
from benchmarks.contest import OLD, OURS
from benchmarks.memory import Memory
from benchmarks.overhead import RULES, Overhead
from benchmarks.passes import Passes
from benchmarks.to_tolerance import BUDGET, TOLERANCES, ToTolerance
from benchmarks.training import Training

COLOURS = {OURS: "#2a6fbb", OLD: "#c9732b"}
SHOWN = 0.99  # the spectral radius at which adjoint solvers are pictured
Bars = dict[str, dict[str, float]]  # contestant -> label -> height


def draw(overhead: Overhead, to_tolerance: ToTolerance, memory: Memory, path: Path) -> None:
    """Write the picture; names of cases and solvers are below the bars."""
    figure = Figure(figsize=(13, 13), layout="constrained")
    top, middle, bottom = figure.subplots(3, 1)
    _bars(top, _times(overhead))
    top.set_title("Time of a solve over that of f alone, 30 evaluations")
    top.axhline(1, color="black", linewidth=0.8)
    top.set_yscale("log")
    top.minorticks_off()
    top.set_yticks([1, 2, 5, 10, 20, 50], labels=["1", "2", "5", "10", "20", "50"])
    tight = TOLERANCES[-1]
    _bars(middle, *_evaluations(to_tolerance))
    middle.set_title(
        f"Evaluations to a relative residual of {tight:.0e} (hatched: not reached in {BUDGET})"
    )
    _bars(bottom, {who: _states(memory, who) for who in COLOURS})
    bottom.set_title(f"Peak memory in states, {memory.case} (line: f alone)")
    bottom.axhline(memory.bare / memory.state, color="black", linewidth=0.8)
    figure.savefig(path, format="png", dpi=120)


def draw_gradients(systems: Adjoint, methods: Passes, steps: Training, path: Path) -> None:
    """Write the picture of the answers about gradients."""
    figure = Figure(figsize=(13, 17), layout="constrained")
    rows = figure.subplots(4, 1)
    _bars(rows[0], *_products(systems))
    rows[0].set_title(
        f"Products with J^T to a relative residual of {adjoint.TOLERANCE:.0e} at a spectral radius "
        f"of {SHOWN} (hatched: not reached in {adjoint.BUDGET})"
    )
    cells = {f"{row.case}\n{row.method}": row for row in methods.rows}
    _bars(rows[1], {OURS: {label: row.ratio.median for label, row in cells.items()}})
    rows[1].set_title("Time of both passes over that of 20 unrolled steps")
    _bars(
        rows[2],
        {OURS: {label: row.held / methods.states[row.case] for label, row in cells.items()}},
    )
    rows[2].set_title("States kept by the graph between the passes")
    rows[2].set_yscale("log")
    heights: Bars = {who: {} for who in COLOURS}
    for run in steps.runs:
        label = f"{run.case}\nbackward by {run.adjoint}"
        heights[run.contestant][label] = 1e3 * run.seconds.median
    _bars(rows[3], heights)
    rows[3].set_title("Milliseconds of a training step to equal residuals")
    figure.savefig(path, format="png", dpi=120)


def _products(systems: Adjoint) -> tuple[Bars, set[tuple[str, str]]]:
    heights: Bars = {who: {} for who in COLOURS}
    failed = set()
    for i, (spectrum, radius) in enumerate(systems.columns):
        for row in systems.rows:
            run = row.runs[i]
            if run is not None and radius == SHOWN:
                label = f"{spectrum}\n{row.solver}"
                heights[row.contestant][label] = run.products if run.reached else adjoint.BUDGET
                if not run.reached:
                    failed.add((row.contestant, label))
    return heights, failed


def _times(overhead: Overhead) -> Bars:
    heights: Bars = {who: {} for who in COLOURS}
    for row in overhead.rows:
        for who, cost in row.cost.items():
            if row.solver in RULES:
                height = cost.total.median / cost.bare.median
                heights[who][f"{row.case}\n{row.solver}"] = height
    return heights


def _evaluations(to_tolerance: ToTolerance) -> tuple[Bars, set[tuple[str, str]]]:
    heights: Bars = {who: {} for who in COLOURS}
    failed = set()
    for row in to_tolerance.rows:
        for who, runs in row.runs.items():
            if row.solver in RULES:
                label = f"{row.case}\n{row.solver}"
                heights[who][label] = runs[-1].calls if runs[-1].reached else BUDGET
                if not runs[-1].reached:
                    failed.add((who, label))
    return heights, failed


def _states(memory: Memory, who: str) -> dict[str, float]:
    return {row.solver: row.peak[who] / memory.state for row in memory.rows if who in row.peak}


def _bars(axes: Axes, heights: Bars, hatched: Collection[tuple[str, str]] = ()) -> None:
    """Draw contestants side by side, one group of bars per label."""
    labels = list(dict.fromkeys(label for bars in heights.values() for label in bars))
    width = 0.8 / len(heights)
    for i, (who, bars) in enumerate(heights.items()):
        for j, label in enumerate(labels):
            if label in bars:
                axes.bar(
                    j + (i - (len(heights) - 1) / 2) * width,
                    bars[label],
                    width,
                    color=COLOURS[who],
                    hatch="//" if (who, label) in hatched else None,
                    edgecolor="white",
                )
        axes.bar(0, 0, color=COLOURS[who], label=who)  # for the legend
    axes.set_xticks(range(len(labels)), labels, rotation=90 if len(labels) > 8 else 0, fontsize=8)
    axes.legend()
