"""The curves of a report, from the log of a run: loss, scores, and how the solver did.

A log may have gaps: values that were NaN or infinite are null, and old or damaged lines may lack
some. What cannot be drawn is left out; nothing is drawn from a single point.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any, NamedTuple

from matplotlib import colormaps

from deq_zoo.drawing import Line, line_plot, new_axes, to_png
from deq_zoo.preset import Preset
from deq_zoo.task import Picture
from torchdeq import Status
from torchdeq.plots import draw_tolerance, plot_evaluations

LogLine = dict[str, Any]
#: Each status has its colour in every report.
STATUS_COLOURS = {
    "CONVERGED": "#2a9d4a",
    "STALLED": "#3b7dd8",
    "MAX_ITER": "#f0a030",
    "DIVERGED": "#d1361e",
    "NONFINITE": "#222222",
}
_WHOLE_BUDGET = "#9a9a9a"  # of MAX_ITER where no tolerance was asked for
_MOST = 2000  # points that a curve can show


def draw_curves(lines: Sequence[LogLine], preset: Preset) -> list[Picture]:
    """Return the pictures of a run's log."""
    train = thin([line for line in lines if line.get("kind") == "train"])
    val = [line for line in lines if line.get("kind") == "eval"]
    return [
        *_loss(train, preset),
        *_scores(val, preset),
        *_convergence(val, preset),
        *_evaluations(train, val),
        *_histogram(val),
        *_residuals(train, val),
        *_statuses(val, preset),
    ]


def number(line: LogLine, *path: str) -> float | None:
    """Return a finite number from a line of the log, or None."""
    value: Any = line
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    usable = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if usable and isfinite(value) else None


def thin(lines: list[LogLine], most: int = _MOST) -> list[LogLine]:
    """Return as many lines as a curve can show, evenly spread, the last one among them."""
    gap = -(-len(lines) // most) or 1
    return lines[(len(lines) - 1) % gap :: gap] if lines else []


def _column(label: str, lines: Sequence[LogLine], *path: str) -> Line:
    points = [(line["step"], number(line, *path)) for line in lines]
    points = [(step, value) for step, value in points if value is not None]
    return Line(label, [step for step, _ in points], [value for _, value in points])  # type: ignore[misc]


def _loss(train: list[LogLine], preset: Preset) -> list[Picture]:
    caption = (
        f"Loss on training batches, each point the mean of {preset.log_every} "
        f"update{'s' if preset.log_every > 1 else ''}."
    )
    return line_plot("loss", caption, [_column("loss", train, "loss")], "update", "loss", log=True)


def _scores(val: list[LogLine], preset: Preset) -> list[Picture]:
    names = dict.fromkeys(name for line in val for name in line.get("metrics") or {})
    pictures = []
    for name in names:
        line = _column("validation", val, "metrics", name)
        lines, score = [line], preset.task.score
        caption = f"{name} on the validation data, which chooses the best checkpoint"
        if preset.target is not None and preset.target.metric == name and len(line.x) > 1:
            ends = [line.x[0], line.x[-1]]
            lines.append(Line("published, on test data", ends, [preset.target.value] * 2, True))
        if name == score.name:
            caption += f" ({'highest' if score.higher_is_better else 'lowest'} wins)"
        else:
            caption += f" by {score.name}"
        label = f"{name}, {score.unit}" if name == score.name and score.unit else name
        pictures += line_plot(f"metric-{name}", f"{caption}.", lines, "update", label)
    return pictures


def _convergence(val: list[LogLine], preset: Preset) -> list[Picture]:
    traces = [_Traced(line["step"], _trace(line), _band(line)) for line in val]
    traces = [each for each in traces if len(each.trace) > 1]
    if not traces:
        return []
    figure, axes = new_axes()
    for i, (step, trace, _) in enumerate(traces):
        shade = colormaps["viridis"](0.9 * i / max(1, len(traces) - 1))
        label = f"update {step}" if i in (0, len(traces) - 1) else None
        axes.plot(range(1, len(trace) + 1), trace, color=shade, linewidth=1.4, label=label)
    low, high = (_gaps(edge) for edge in traces[-1].band or ((), ()))
    if len(low) == len(high) == len(trace):
        label = f"80 % of samples, update {step}"
        axes.fill_between(range(1, len(low) + 1), low, high, color=shade, alpha=0.3, label=label)
    tolerance = _relative_tolerance(preset)
    if tolerance is not None:
        draw_tolerance(axes, tolerance)
    axes.set(xlabel="evaluations of f", ylabel="relative residual |f(z) - z| / |f(z)|")
    axes.set_yscale("log")
    axes.legend(frameon=False, fontsize=8)
    caption = (
        "Convergence of the solver on the validation data: median over samples, early "
        "(dark) to late (light) in training. " + _tolerance_text(preset)
    )
    return [Picture("convergence", caption.strip(), to_png(figure))]


class _Traced(NamedTuple):
    """The residuals by evaluation after some updates, and their band over samples, if logged."""

    step: int
    trace: list[float]
    band: list[list[float]]


def _trace(line: LogLine) -> list[float]:
    values = (line.get("solver") or {}).get("trace") or []
    return _gaps(values) if isinstance(values, list) else []


def _band(line: LogLine) -> list[list[float]]:
    """Return the lower and upper residuals of most samples; none in logs of earlier versions."""
    values = (line.get("solver") or {}).get("band") or []
    return values if isinstance(values, list) and len(values) == 2 else []


def _gaps(values: Sequence[Any]) -> list[float]:
    """Return numbers, with NaN where there is none."""
    return [value if isinstance(value, (int, float)) else float("nan") for value in values]


def _histogram(val: list[LogLine]) -> list[Picture]:
    counts = (val[-1].get("solver") or {}).get("steps") if val else None
    if not isinstance(counts, dict) or len(counts) < 2:
        return []
    steps = [float(step) for step, count in counts.items() for _ in range(int(count))]
    caption = (
        "Evaluations that each validation sample needed for its returned state, after update "
        f"{val[-1]['step']}."
    )
    return [Picture("evaluations", caption, to_png(plot_evaluations(steps)))]


def _relative_tolerance(preset: Preset) -> float | None:
    deq = preset.task.deq
    if deq.f_rtol is not None:
        return deq.f_rtol or None
    return deq.f_tol or None if deq.f_stop_mode == "rel" else None


def _asks_tolerance(preset: Preset) -> bool:
    deq = preset.task.deq
    return bool(deq.f_tol or deq.f_rtol or deq.f_atol) and "simple" not in deq.f_solver


def _tolerance_text(preset: Preset) -> str:
    deq = preset.task.deq
    if not _asks_tolerance(preset):
        return "No tolerance was asked for: every solve spends its budget."
    if _relative_tolerance(preset) is None:
        return f"The tolerance, {deq.f_tol:g}, is of the absolute residual, which is not shown."
    return ""


def _evaluations(train: list[LogLine], val: list[LogLine]) -> list[Picture]:
    lines = [
        _column("training", train, "nfe"),
        _column("validation", _solved(val), "solver", "nfe"),
    ]
    caption = f"Evaluations of f per solve, {_places(lines)}."
    return line_plot("nfe", caption, lines, "update", "evaluations of f")


def _residuals(train: list[LogLine], val: list[LogLine]) -> list[Picture]:
    lines = [
        _column("training", train, "residual"),
        _column("validation", _solved(val), "solver", "residual"),
    ]
    caption = f"Relative residual of the returned state, mean over samples, {_places(lines)}."
    return line_plot("residual", caption, lines, "update", "relative residual", log=True)


def _places(lines: Sequence[Line]) -> str:
    """Return where the curves with two points at least come from, in words."""
    named = {"training": "in training", "validation": "on the validation data"}
    return " and ".join(named[line.label] for line in lines if len(line.x) > 1)


def _solved(val: list[LogLine]) -> list[LogLine]:
    """Return the evaluations in which a solver ran."""
    return [line for line in val if _status_counts(line)]


def _status_counts(line: LogLine) -> dict[str, float]:
    counts = (line.get("solver") or {}).get("statuses")
    return counts if isinstance(counts, dict) else {}


def _statuses(val: list[LogLine], preset: Preset) -> list[Picture]:
    solved = _solved(val)
    if not solved:
        return []
    figure, axes = new_axes()
    asked = _asks_tolerance(preset)
    bottom = [0.0] * len(solved)
    labels = [str(line["step"]) for line in solved]
    for status in Status:
        counts = [_status_counts(line) for line in solved]
        shares = [100 * c.get(status.name, 0) / max(1, sum(c.values())) for c in counts]
        if any(shares):
            budget = status.name == "MAX_ITER" and not asked
            label = "whole budget (no tolerance)" if budget else status.name.lower()
            colour = _WHOLE_BUDGET if budget else STATUS_COLOURS[status.name]
            axes.bar(labels, shares, bottom=bottom, label=label, color=colour, width=0.8)
            bottom = [a + b for a, b in zip(bottom, shares, strict=True)]
    axes.set(xlabel="update", ylabel="samples, %", ylim=(0, 100))
    axes.set_xticks(range(0, len(labels), max(1, len(labels) // 8)))
    axes.legend(fontsize=8, loc="lower left")
    caption = f"How the solve of each validation sample ended. {_tolerance_text(preset)}"
    return [Picture("statuses", caption.strip(), to_png(figure))]
