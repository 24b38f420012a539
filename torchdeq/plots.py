"""Plots of solves and Jacobians; they need matplotlib, which the extra `insight` installs.

Each function draws into `axes`, or into a new figure, and returns the figure: `fig.savefig(...)`,
or `to_png(fig)` for its bytes.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchdeq.checks import require
from torchdeq.diagnostics import Landscape, SolverTrial
from torchdeq.stats import SolverStat

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "draw_residuals",
    "draw_tolerance",
    "new_axes",
    "plot_eigenvalues",
    "plot_evaluations",
    "plot_landscape",
    "plot_residuals",
    "plot_solvers",
    "to_png",
]

_RESIDUAL = {True: "relative residual |f(z) - z| / |f(z)|", False: "residual |f(z) - z|"}
_BANDS = ((0.0, 1.0, 0.12), (0.1, 0.9, 0.22))  # quantiles over samples, and the opacity


def new_axes(width: float = 5.6, height: float = 3.4) -> tuple[Figure, Any]:
    """Return a new figure of this size in inches with a grid, and its axes."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.grid(alpha=0.3)
    return figure, axes


def to_png(figure: Figure) -> bytes:
    """Return a figure as the bytes of a PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120, bbox_inches="tight", facecolor="white")
    return buffer.getvalue()


def plot_residuals(
    stats: SolverStat, tolerance: float | None = None, *, relative: bool = True, axes: Any = None
) -> Figure:
    """Plot residuals by iterate: the median over samples, and bands of 80 % and of all samples.

    Args:
        stats: of one solve.
        tolerance: drawn as a line, if given; it must be of the kind that is plotted.
        relative: plot relative residuals, not absolute ones.
        axes: of matplotlib; a new figure by default.
    """
    figure, axes = _axes(axes)
    traces = stats["rel_trace" if relative else "abs_trace"].detach().double().cpu()
    draw_residuals(axes, traces, label="median over samples" if len(traces) > 1 else None)
    if tolerance:
        draw_tolerance(axes, tolerance)
    one_each = traces.shape[1] == stats.nfe
    axes.set(xlabel="evaluations of f" if one_each else "iterates", ylabel=_RESIDUAL[relative])
    _finish(axes)
    return figure


def draw_residuals(
    axes: Any, traces: Tensor, *, label: str | None = None, colour: Any = None
) -> None:
    """Draw traces (B, N) of residuals on a logarithmic axis: their median, and bands over samples.

    Values that are zero or not finite are gaps.
    """
    require(traces.numel(), "traces must have samples and iterates", tuple(traces.shape))
    traces = torch.where(traces.isfinite() & (traces > 0), traces, torch.nan)
    x = range(1, traces.shape[1] + 1)
    (line,) = axes.plot(
        x, traces.nanquantile(0.5, 0).tolist(), label=label, color=colour, linewidth=1.6
    )
    if len(traces) > 1:
        for low, high, opacity in _BANDS:
            edges = (traces.nanquantile(q, 0).tolist() for q in (low, high))
            axes.fill_between(x, *edges, color=line.get_color(), alpha=opacity, linewidth=0)
    axes.set_yscale("log")


def draw_tolerance(axes: Any, tolerance: float) -> None:
    """Draw a tolerance as a dotted line."""
    axes.axhline(tolerance, color="black", linestyle=":", linewidth=1.2, label="tolerance")


def plot_evaluations(
    stats: SolverStat | Sequence[float], budget: int | None = None, *, axes: Any = None
) -> Figure:
    """Plot a histogram of the evaluations that each sample needed.

    Args:
        stats: of one solve, or the numbers of evaluations themselves.
        budget: drawn as a line, if given.
        axes: of matplotlib; a new figure by default.
    """
    figure, axes = _axes(axes)
    steps = stats["nstep"].tolist() if isinstance(stats, SolverStat) else list(stats)
    low, high = (int(min(steps)), int(max(steps))) if steps else (0, 1)
    width = max(1, -(-(high - low + 1) // 40))  # at most about 40 bars, of whole numbers
    edges = [low - 0.5 + width * i for i in range((high - low) // width + 2)]
    axes.hist(steps, bins=edges, color="#3b7dd8", edgecolor="white", linewidth=0.5)
    axes.set_xlim(max(0, min(low, high - 4)) - 1, max(high, low + 4, budget or 0) + 1)
    for axis in (axes.xaxis, axes.yaxis):
        axis.get_major_locator().set_params(integer=True)
    if budget is not None:
        axes.axvline(budget, color="black", linestyle=":", linewidth=1.2, label="budget")
    axes.set(xlabel="evaluations of f up to the returned state", ylabel="samples")
    _finish(axes)
    return figure


def plot_eigenvalues(values: Tensor, *, axes: Any = None) -> Figure:
    """Plot eigenvalues in the complex plane, with the unit circle that plain iteration needs.

    Args:
        values: complex, (B, count) or (count,), e.g. `eigenvalues(f, z).values`; with up to eight
            samples, each has a colour.
        axes: of matplotlib; a new figure by default.
    """
    figure, axes = _axes(axes, 4.2, 4.2)
    angle = torch.linspace(0, 2 * torch.pi, 200)
    axes.plot(angle.cos().tolist(), angle.sin().tolist(), color="black", linewidth=1.0)
    axes.axhline(0, color="black", linewidth=0.5, alpha=0.5)
    axes.axvline(0, color="black", linewidth=0.5, alpha=0.5)
    axes.plot([1], [0], marker="x", color="#d1361e", linestyle="", label="1: I - J is singular")
    values = torch.atleast_2d(values.detach().cpu()).to(torch.complex128)  # real ones, too
    few = len(values) <= 8
    for i, row in enumerate(values):
        colour = f"C{i}" if few else "C0"
        axes.scatter(row.real.tolist(), row.imag.tolist(), s=18, alpha=0.8, color=colour)
    finite = values.abs()[values.abs().isfinite()]
    extent = 1.15 * max(1.0, float(finite.max()) if len(finite) else 1.0)
    axes.set(xlabel="real part", ylabel="imaginary part", aspect="equal")
    axes.set(xlim=(-extent, extent), ylim=(-extent, extent))
    _finish(axes)
    return figure


def plot_landscape(landscape: Landscape, sample: int = 0, *, axes: Any = None) -> Figure:
    """Plot the residual around a state of one sample: dark is small, the cross is the state.

    Args:
        landscape: from `torchdeq.diagnostics.landscape`.
        sample: which one.
        axes: of matplotlib; a new figure by default.
    """
    figure, axes = _axes(axes, 4.8, 4.0)
    residuals = landscape.residuals[sample].double().cpu()
    # At the fixed point itself the logarithm has no bottom: stop half below the next point.
    positive = residuals.flatten().sort().values
    floor = float(positive[1]) / 2 if len(positive) > 1 and float(positive[1]) > 0 else 1e-30
    levels = residuals.clamp_min(floor).log10()
    x = landscape.x.double().cpu().tolist()
    filled = axes.contourf(x, x, levels.tolist(), levels=24, cmap="viridis")
    axes.contour(x, x, levels.tolist(), levels=8, colors="white", linewidths=0.4, alpha=0.6)
    axes.plot([0], [0], marker="x", color="#d1361e", linestyle="")
    figure.colorbar(filled, ax=axes, label="log10 |f(z) - z|")
    axes.set(xlabel="along a, in |z*|", ylabel="along b, in |z*|", aspect="equal")
    axes.grid(False)
    return figure


def plot_solvers(
    trials: Sequence[SolverTrial] | Mapping[str, SolverStat],
    tolerance: float | None = None,
    *,
    axes: Any = None,
) -> Figure:
    """Plot the median residual of several solvers by evaluations of `f`.

    Args:
        trials: of a diagnosis, or statistics by name.
        tolerance: a relative one, drawn as a line, if given.
        axes: of matplotlib; a new figure by default.
    """
    figure, axes = _axes(axes)
    if isinstance(trials, Mapping):
        stats = dict(trials)
    else:
        stats = {t.name: t.stats for t in trials if t.stats is not None}
    for name, each in stats.items():
        traces = each["rel_trace"].detach().double().cpu()
        if not traces.numel():
            continue
        trace = traces.nanmedian(0).values
        trace = torch.where(trace.isfinite() & (trace > 0), trace, torch.nan)
        # A step of some solvers takes several evaluations: spread the iterates over all of them.
        ends = torch.linspace(1, max(1, each.nfe), len(trace))
        marker = "." if len(trace) < 30 else None
        axes.plot(ends.tolist(), trace.tolist(), label=name, linewidth=1.6, marker=marker)
    if tolerance:
        draw_tolerance(axes, tolerance)
    axes.set_yscale("log")
    axes.set(xlabel="evaluations of f", ylabel=f"median {_RESIDUAL[True]}")
    _finish(axes)
    return figure


def _axes(axes: Any, *size: float) -> tuple[Figure, Any]:
    """Return the caller's axes with their figure, or new ones."""
    return new_axes(*size) if axes is None else (axes.figure, axes)


def _finish(axes: Any) -> None:
    """Add a legend if there is something to explain."""
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=8)
