"""How many evaluations, and how long, to a relative residual?"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from benchmarks.contest import OLD, OURS, Contest, Worker, interleave
from benchmarks.spread import Spread
from benchmarks.table import render

BUDGET = 300
TOLERANCES = (1e-3, 1e-5, 1e-6)
SAMPLE = 0.02  # seconds that one measurement should take at least


@dataclass(frozen=True)
class Run:
    """One contestant's solve to a tolerance."""

    calls: int
    claimed: float  # the relative residual that its statistics tell of
    residual: float  # the relative residual of the state it returned
    seconds: Spread
    tol: float

    @property
    def reached(self) -> bool:
        return self.claimed <= self.tol

    @property
    def honest(self) -> bool:
        """Return whether the returned state is as good as claimed, up to rounding."""
        return not self.reached or self.residual <= 1.5 * self.tol

    def cells(self) -> list[str]:
        """Return evaluations and milliseconds as cells of a table."""
        calls = str(self.calls) if self.reached else f"fails {self.calls}"
        return [calls + ("" if self.honest else "!"), f"{1e3 * self.seconds.median:.2f}"]


@dataclass(frozen=True)
class Row:
    """One solver on one problem: a run for each contestant and tolerance."""

    case: str
    solver: str
    runs: dict[str, list[Run]]


@dataclass(frozen=True)
class ToTolerance:
    """The answer."""

    rows: list[Row]

    def slower_than_plain(self) -> list[str]:
        """Where Anderson acceleration needs more evaluations than plain iteration below 1e-3."""
        runs = {(row.case, row.solver): row.runs[OURS] for row in self.rows if OURS in row.runs}
        found = []
        for (case, solver), mixed in runs.items():
            if solver != "anderson" or (case, "fixed_point_iter") not in runs:
                continue
            for run, plain in zip(mixed, runs[case, "fixed_point_iter"], strict=True):
                if (
                    run.tol < 1e-3
                    and plain.reached
                    and not (run.reached and run.calls <= plain.calls)
                ):
                    found.append(f"{case} at {run.tol:.0e} ({run.calls} > {plain.calls})")
        return found

    def __str__(self) -> str:
        header = ["case", "solver"]
        for tol in TOLERANCES:
            header += [f"{tol:.0e} {OURS}", "ms", OLD, "ms"]
        rows = [[row.case, row.solver, *_cells(row)] for row in self.rows]
        slower = self.slower_than_plain()
        verdict = f"NO: {', '.join(slower)}" if slower else "yes"
        parts = [
            f"TO TOLERANCE: evaluations and time to a relative residual, at most {BUDGET}; medians",
            render(header, rows, texts=2),
            f"fails n: gave up after n evaluations; -: not in {OLD}",
            f"anderson <= fixed_point_iter in evaluations at 1e-05 and 1e-06, ours: {verdict}",
        ]
        if any(not run.honest for row in self.rows for runs in row.runs.values() for run in runs):
            parts.append("!: the returned state is worse than claimed")
        return "\n".join(parts)


def run(contest: Contest, cases: list[str], rounds: int) -> ToTolerance:
    """Solve every case with every solver to every tolerance."""
    stopping = contest.workers[0].stopping
    cells = [(case, solver) for case in cases for solver in stopping]
    rows = [
        contest.attempt(partial(_measure, contest, case, solver, rounds)) for case, solver in cells
    ]
    return ToTolerance([row for row in rows if row])


def _measure(contest: Contest, case: str, solver: str, rounds: int) -> Row:
    workers = [worker for worker in contest.workers if solver in worker.stopping]
    runs: dict[str, list[Run]] = {worker.name: [] for worker in workers}
    for tol in TOLERANCES:
        for name, run in _race(workers, case, solver, tol, rounds).items():
            runs[name].append(run)
    return Row(case, solver, runs)


def _race(workers: list[Worker], case: str, solver: str, tol: float, rounds: int) -> dict[str, Run]:
    what = {"case": case, "solver": solver, "calls": BUDGET, "tol": tol}
    seen = {worker.name: worker.ask("check", **what) for worker in workers}
    turns = {worker.name: partial(worker.ask, "time", **what, least=SAMPLE) for worker in workers}
    answers = interleave(turns, rounds, seconds=1.0)
    return {
        name: Run(
            calls=seen[name]["calls"],
            claimed=seen[name]["claimed"],
            residual=seen[name]["residual"],
            seconds=Spread.of([a["seconds"] for a in got]),
            tol=tol,
        )
        for name, got in answers.items()
    }


def _cells(row: Row) -> list[str]:
    cells = []
    for i in range(len(TOLERANCES)):
        for who in (OURS, OLD):
            cells += row.runs[who][i].cells() if who in row.runs else ["-", "-"]
    return cells
