"""Plots: what each figure shows; `TORCHDEQ_PLOTS=FOLDER` keeps them to look at."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import problems
from tests.diagnostics.maps import linear_maps
from torchdeq import Anderson, Broyden, FixedPointIter, NewtonKrylov, Solver, StopRule, solve
from torchdeq.diagnostics import eigenvalues, landscape
from torchdeq.plots import (
    plot_eigenvalues,
    plot_evaluations,
    plot_landscape,
    plot_residuals,
    plot_solvers,
    to_png,
)

pytest.importorskip("matplotlib")


def keep(name: str, figure: Any) -> Any:
    """Return the axes of a figure; write its picture if someone wants to look."""
    png = to_png(figure)
    assert png.startswith(b"\x89PNG")
    if "TORCHDEQ_PLOTS" in os.environ:
        Path(os.environ["TORCHDEQ_PLOTS"], f"{name}.png").write_bytes(png)
    return figure.axes[0]


def samples() -> Any:
    """Return statistics of samples that converge at different rates."""
    rate = torch.linspace(0.3, 0.95, 40, dtype=torch.float64)[:, None]
    x = torch.randn(40, 5, dtype=torch.float64)
    stop = StopRule(60, 1e-4, "rel")
    return solve(lambda z: rate * z.flip(1) + x, torch.zeros_like(x), FixedPointIter(), stop,
                 on_failure="ignore").stats  # fmt: skip


def labels(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_residuals_have_a_median_two_bands_and_the_tolerance() -> None:
    stats = samples()
    axes = keep("residuals", plot_residuals(stats, 1e-4))
    assert labels(axes) == ["median over samples", "tolerance"]
    assert len(axes.collections) == 2
    median = stats["rel_trace"].quantile(0.5, 0)
    torch.testing.assert_close(torch.tensor(axes.lines[0].get_ydata()), median)
    assert axes.get_xlabel() == "evaluations of f"
    assert axes.get_yscale() == "log"


def test_one_sample_with_gaps_is_a_line() -> None:
    stats = samples()
    stats["rel_trace"] = torch.tensor([[1.0, 0.0, float("inf"), 0.1]])
    axes = keep("gaps", plot_residuals(stats))
    assert len(axes.collections) == 0
    assert torch.tensor(axes.lines[0].get_ydata()).isnan().tolist() == [False, True, True, False]


def test_evaluations_are_a_histogram_of_whole_numbers() -> None:
    stats = samples()
    axes = keep("evaluations", plot_evaluations(stats, budget=60))
    assert sum(patch.get_height() for patch in axes.patches) == 40
    assert labels(axes) == ["budget"]
    axes = keep("evaluations-equal", plot_evaluations([3, 3, 3]))
    assert [patch.get_height() for patch in axes.patches] == [3]


def test_eigenvalues_stand_beside_the_unit_circle() -> None:
    f, z = linear_maps([problems.rotation(0.9, 8), problems.contraction(1.4, 8)])
    axes = keep("eigenvalues", plot_eigenvalues(eigenvalues(f, z, count=8).values))
    assert len(axes.collections) == 2
    circle = torch.tensor(axes.lines[0].get_xydata())
    torch.testing.assert_close(circle.norm(dim=1), torch.ones(200, dtype=circle.dtype))


def test_a_landscape_has_its_minimum_at_the_cross() -> None:
    f, z0 = problems.tanh_layer(batch=2)
    z = solve(f, z0, Anderson(), StopRule(100, 1e-10)).z
    axes = keep("landscape", plot_landscape(landscape(f, z, extent=1.0, points=15)))
    assert axes.get_xlabel() == "along a, in |z*|"


def test_solvers_are_compared_by_evaluations() -> None:
    f, z0, _ = problems.affine(problems.rotation(0.95))
    stop = StopRule(100, 1e-8, "rel")
    solvers: dict[str, Solver[Any]] = {
        "fixed_point_iter": FixedPointIter(),
        "anderson": Anderson(),
        "broyden": Broyden(),
        "newton_krylov": NewtonKrylov(),
    }
    stats = {n: solve(f, z0, s, stop, on_failure="ignore").stats for n, s in solvers.items()}
    axes = keep("solvers", plot_solvers(stats, 1e-8))
    assert labels(axes) == [*solvers, "tolerance"]
    ends = [line.get_xdata()[-1] for line in axes.lines[:4]]
    assert ends == [s.nfe for s in stats.values()]


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        plot_evaluations([1])


def test_real_eigenvalues_and_solves_without_iterates() -> None:
    axes = plot_eigenvalues(torch.tensor([0.5, -0.3])).axes[0]
    assert len(axes.collections) == 1
    empty = solve(lambda z: 0.5 * z, torch.zeros(0, 2), Anderson(), StopRule(5, 1e-3)).stats
    plot_solvers({"anderson": empty})
    with pytest.raises(ValueError, match="samples and iterates"):
        plot_residuals(empty)
