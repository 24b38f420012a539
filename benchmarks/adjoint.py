"""How many products with the Jacobian does an adjoint solve need?

And how near does a phantom gradient, which solves nothing, come to the exact one?
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from benchmarks.contest import Contest, Worker
from benchmarks.spectra import ABOVE, BATCH, BELOW, SPECTRA, WIDTH
from benchmarks.table import render

BUDGET = 400
TOLERANCE = 1e-6
ROUNDING = 1.5  # a residual in float64 may exceed that in float32 by so much
STEPS = (1, 5, 10)


@dataclass(frozen=True)
class Run:
    """One adjoint solve."""

    products: int
    residual: float  # the worst of the batch, relative to the cotangent, in float64

    @property
    def reached(self) -> bool:
        return self.residual <= ROUNDING * TOLERANCE

    def __str__(self) -> str:
        text = str(self.products) if self.reached else f"({self.residual:.0e})"
        return text if self.products <= BUDGET else f"{text}!"


@dataclass(frozen=True)
class Row:
    """One solver: a run for each spectrum and radius, None where it does not apply."""

    contestant: str
    solver: str
    runs: list[Run | None]


@dataclass(frozen=True)
class Adjoint:
    """The answer."""

    columns: list[tuple[str, float]]  # spectrum and radius
    rows: list[Row]
    cosines: dict[int, list[float]]  # by phantom steps

    def __str__(self) -> str:
        header = [
            f"{spectrum} {radius}" if radius == BELOW[0] else str(radius)
            for spectrum, radius in self.columns
        ]
        solvers = [
            [row.contestant, row.solver, *("-" if run is None else str(run) for run in row.runs)]
            for row in self.rows
        ]
        phantoms = [
            [str(steps), *(f"{c:.3f}" for c in cosines)] for steps, cosines in self.cosines.items()
        ]
        over = any(run and run.products > BUDGET for row in self.rows for run in row.runs)
        return "\n".join(
            (
                f"ADJOINT: products with J^T to a residual of {TOLERANCE:.0e} relative to the "
                f"cotangent, at most {BUDGET}",
                f"({BATCH} systems of {WIDTH}, float32, a random cotangent; columns: spectrum and "
                "spectral radius of J)",
                render(["", "solver", *header], solvers, texts=2),
                "counted, not claimed; (r): it ended at the residual r, measured in float64"
                + ("; !: it took more than the budget" if over else ""),
                "",
                "PHANTOM: lowest cosine of the batch with the exact gradient",
                render(["steps", *header], phantoms, texts=1),
            )
        )


def run(contest: Contest, quick: bool) -> Adjoint:
    """Solve every system with every solver; the numbers have no noise."""
    columns = [(s, r) for s in SPECTRA for r in (*BELOW, ABOVE[s])]
    columns = columns[:2] if quick else columns
    rows = [
        Row(worker.name, solver, [_solve(contest, worker, solver, *c) for c in columns])
        for worker, solver in _solvers(contest)
    ]
    ask = contest.workers[0].ask
    cosines = {
        k: [ask("phantom", spectrum=s, radius=r, steps=k)["cosine"] for s, r in columns]
        for k in STEPS
    }
    return Adjoint(columns, rows, cosines)


def _solvers(contest: Contest) -> Iterator[tuple[Worker, str]]:
    for worker in contest.workers:
        for solver in worker.ask("adjoints")["adjoints"]:
            yield worker, solver


def _solve(
    contest: Contest, worker: Worker, solver: str, spectrum: str, radius: float
) -> Run | None:
    if solver == "shine" and radius > 1:
        return None  # no fixed point to have learnt from
    what = {"spectrum": spectrum, "radius": radius, "solver": solver}
    cell = partial(worker.ask, "adjoint", **what, products=BUDGET, tol=TOLERANCE)
    found = contest.attempt(cell)
    return None if found is None else Run(found["products"], found["residual"])
