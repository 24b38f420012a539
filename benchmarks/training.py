"""How long is a training step to equal tolerance?"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from benchmarks.contest import OLD, CellFailed, Contest, Worker, interleave
from benchmarks.spread import Spread
from benchmarks.table import render

CASES = ("conv", "attention")
SOLVER, CALLS, TOLERANCE = "anderson", 200, 1e-4  # of the forward pass
ADJOINTS = ("anderson", "broyden")  # of both contestants; ours has GMRES, too
PRODUCTS, ADJOINT_TOLERANCE = 400, 1e-6  # of the backward pass
ROUNDING = 1.5  # a residual computed again may differ by so much
SAMPLE = 0.1  # seconds that one measurement should take at least


@dataclass(frozen=True)
class Run:
    """One contestant's step."""

    case: str
    contestant: str
    adjoint: str
    calls: int  # evaluations of f
    products: int  # with its Jacobian
    forward: float  # relative residual of the state
    backward: float  # residual of the adjoint system, relative to the cotangent
    seconds: Spread
    ratio: Spread | None  # to the time of 0.1.0 with its faster adjoint, by round

    def cells(self) -> list[str]:
        """Return a line of the table."""
        cells = [self.case, self.contestant, self.adjoint, str(self.calls), str(self.products)]
        cells += [f"{self.forward:.1e}", f"{self.backward:.1e}"]
        cells += [f"{1e3 * self.seconds.median:.1f}", self.seconds.percent]
        return [*cells, f"{self.ratio.median:.2f}" if self.ratio else "-"]


@dataclass(frozen=True)
class Training:
    """The answer."""

    runs: list[Run]

    def __str__(self) -> str:
        header = ["case", "contestant", "backward by", "calls of f", "products"]
        header += ["forward res.", "backward res.", "ms", "iqr", f"/{OLD}"]
        return "\n".join(
            (
                f"TRAINING: both passes of a step, forward by {SOLVER} to {TOLERANCE:.0e}, "
                f"backward to {ADJOINT_TOLERANCE:.0e}; medians",
                render(header, [run.cells() for run in self.runs], texts=3),
                "residuals are measured on what came out: the state's relative to f(z), the "
                "adjoint's to the cotangent",
                f"/{OLD}: beside the faster of its adjoints",
            )
        )


def run(contest: Contest, rounds: int, quick: bool) -> Training:
    """Measure a step of every contestant, in turns."""
    cases = CASES[:1] if quick else CASES
    found = [contest.attempt(partial(_measure, contest, case, rounds)) for case in cases]
    return Training([run for runs in found if runs for run in runs])


def _measure(contest: Contest, case: str, rounds: int) -> list[Run]:
    ours, *_ = workers = contest.workers
    entries = [(ours, "gmres"), *((worker, adjoint) for adjoint in ADJOINTS for worker in workers)]
    checks = [contest.attempt(partial(_check, *entry, case)) for entry in entries]
    found = {entry: check for entry, check in zip(entries, checks, strict=True) if check}
    turns = {
        entry: partial(entry[0].ask, "time_step", case=case, least=SAMPLE, **_ask(entry[1]))
        for entry in found
    }
    answers = interleave(turns, rounds, seconds=90, least=3)
    times = {entry: [a["seconds"] for a in got] for entry, got in answers.items()}
    old = [mine for (worker, _), mine in times.items() if worker.name == OLD]
    base = min(old, key=median) if old else None
    return [
        Run(
            case,
            worker.name,
            adjoint,
            **found[worker, adjoint],
            seconds=Spread.of(mine),
            ratio=Spread.of([a / b for a, b in zip(mine, base, strict=True)]) if base else None,
        )
        for (worker, adjoint), mine in times.items()
    ]


def _check(worker: Worker, adjoint: str, case: str) -> dict[str, Any]:
    """Count one step; times are comparable only if all contestants reach the tolerances."""
    check = worker.ask("check_step", case=case, **_ask(adjoint))
    for name, tol in (("forward", TOLERANCE), ("backward", ADJOINT_TOLERANCE)):
        if check[name] > ROUNDING * tol:
            raise CellFailed(
                f"{worker.name}, {case}, {adjoint}: {name} residual {check[name]:.1e} > {tol:.0e}"
            )
    return check


def _ask(adjoint: str) -> dict[str, Any]:
    forward = {"solver": SOLVER, "calls": CALLS, "tol": TOLERANCE}
    return {**forward, "adjoint": adjoint, "products": PRODUCTS, "adjoint_tol": ADJOINT_TOLERANCE}
