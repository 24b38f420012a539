"""Draw the figures of the site: `python -m tools.figures` renews `docs/figures/`.

All of them are counts or trajectories of seeded problems, so every machine draws the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import torch
from torch import Tensor, nn

from torchdeq import (
    Anderson,
    Broyden,
    FixedPointIter,
    Implicit,
    Phantom,
    Solver,
    StopRule,
    fixed_point,
    solve,
)
from torchdeq.diagnostics import saved_bytes

FIGURES = Path(__file__).parents[1] / "docs" / "figures"
STARTS = ((2.6, 2.2), (-2.8, 1.4), (0.6, -2.8))
COLOURS = ("#3b6fb6", "#d1495b", "#2e8b57")
TEXT = "#7a7a7a"  # readable on a light and on a dark page


def main() -> None:
    """Draw all figures."""
    matplotlib.use("svg")
    matplotlib.rcParams.update(
        {
            "svg.hashsalt": "torchdeq",  # the same file from the same numbers
            "savefig.transparent": True,
            "text.color": TEXT,
            "axes.edgecolor": TEXT,
            "axes.labelcolor": TEXT,
            "xtick.color": TEXT,
            "ytick.color": TEXT,
        }
    )
    FIGURES.mkdir(exist_ok=True)
    draw_paths(FIGURES / "paths.svg")
    draw_memory(FIGURES / "memory.svg")


def spiral(z: Tensor) -> Tensor:
    """Return a map of the plane that turns and contracts towards its fixed point."""
    turn = torch.tensor([[0.55, -0.72], [0.72, 0.55]], dtype=z.dtype)
    return torch.tanh(z @ turn.mT) + 0.15 * torch.sin(z) + torch.tensor([0.3, -0.2], dtype=z.dtype)


def visited(solver: Solver[Any], start: tuple[float, float]) -> Tensor:
    """Return (n, 2) the points at which a solver evaluates the map, to a residual of 1e-3."""
    points: list[Tensor] = []

    def f(z: Tensor) -> Tensor:
        points.append(z.clone())
        return spiral(z)

    z0 = torch.tensor([start], dtype=torch.float64)
    solve(f, z0, solver, StopRule(max_iter=80, tol=1e-3))
    return torch.cat(points)


def draw_paths(path: Path) -> None:
    """Draw the points that three solvers visit from three starts."""
    from matplotlib import pyplot

    solvers: dict[str, Solver[Any]] = {
        "plain iteration": FixedPointIter(),
        "Anderson acceleration": Anderson(m=3),
        "Broyden's method": Broyden(),
    }
    figure, axes = pyplot.subplots(1, 3, figsize=(9.6, 3.4), sharex=True, sharey=True)
    for ax, (name, solver) in zip(axes, solvers.items(), strict=True):
        counts = []
        for start, colour in zip(STARTS, COLOURS, strict=True):
            points = visited(solver, start)
            counts.append(len(points))
            ax.plot(*points.T.numpy(), "o-", color=colour, markersize=2.5, linewidth=0.9)
        ax.plot(*points[-1].numpy(), "*", color="#e9a820", markersize=11, zorder=3)
        ax.set_title(f"{name}\n{', '.join(map(str, counts))} evaluations", fontsize=10)
        ax.set_aspect("equal")
    figure.supxlabel("first number of the state", fontsize=9, color=TEXT)
    axes[0].set_ylabel("second number of the state", fontsize=9)
    _save(figure, path)


def draw_memory(path: Path) -> None:
    """Draw what a training step keeps, by evaluations, for three ways to differentiate."""
    from matplotlib import pyplot

    torch.manual_seed(0)
    cell = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
    x = torch.randn(256, 64)

    def f(z: Tensor) -> Tensor:
        return torch.tanh(0.5 * cell(z) + x)

    def differentiable(solved: int, backward: Any) -> Tensor:
        stop = StopRule(max_iter=solved, tol=0.0)
        z0 = torch.zeros_like(x)
        return fixed_point(f, z0, solver=FixedPointIter(), stop=stop, backward=backward).z

    counts = list(range(10, 65, 5))
    ways: dict[str, Callable[[int], Tensor]] = {
        "unrolled": lambda n: differentiable(0, Phantom(grad=n)),
        "phantom, 5 steps": lambda n: differentiable(n - 5, Phantom(grad=5)),
        "implicit": lambda n: differentiable(n, Implicit()),
    }
    figure, ax = pyplot.subplots(figsize=(5.6, 3.2))
    for (name, run), colour in zip(ways.items(), COLOURS[::-1], strict=True):
        kept = [saved_bytes(partial(run, n)) / 2**20 for n in counts]
        ax.plot(counts, kept, "o-", color=colour, markersize=3, label=name)
    ax.set(xlabel="evaluations of f in the forward pass", ylabel="kept for the backward pass, MB")
    ax.set_ylim(bottom=0)
    ax.legend(frameon=False, labelcolor=TEXT)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    """Write a figure without the date."""
    for ax in figure.axes:
        ax.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")


if __name__ == "__main__":
    main()
