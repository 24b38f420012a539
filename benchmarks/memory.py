"""How much memory does a solve use at its peak?"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from benchmarks.cases import CASES, rows
from benchmarks.contest import OLD, OURS, Contest
from benchmarks.table import render

CALLS = 30


@dataclass(frozen=True)
class Row:
    """The bytes in use at the peak of one solve, by contestant."""

    solver: str
    peak: dict[str, int]


@dataclass(frozen=True)
class Memory:
    """The answer."""

    case: str
    state: int  # bytes of one state
    bare: int  # bytes at the peak of plain calls of f
    rows: list[Row]

    def __str__(self) -> str:
        header = ["solver", f"{OURS} MB", "states", f"{OLD} MB", "states", f"{OLD}/{OURS}"]
        table = [self._cells(row) for row in self.rows]
        table.insert(0, self._cells(Row("f alone", {OURS: self.bare})))
        return "\n".join(
            (
                f"MEMORY: most bytes held by tensors during a solve of {CALLS} evaluations of "
                f"{self.case} (one state: {self.state / 1e6:.1f} MB)",
                render(header, table, texts=1),
                "live allocations of torch's CPU allocator; start and weights are not counted",
            )
        )

    def _cells(self, row: Row) -> list[str]:
        cells = [row.solver]
        for who in (OURS, OLD):
            peak = row.peak.get(who)
            cells += [f"{peak / 1e6:.0f}", f"{peak / self.state:.1f}"] if peak else ["-", "-"]
        ratio = f"{row.peak[OLD] / row.peak[OURS]:.2f}" if OLD in row.peak else "-"
        return [*cells, ratio]


def run(contest: Contest, case: str) -> Memory:
    """Measure every solver once: the number has no noise."""
    found = [contest.attempt(partial(_measure, contest, case, name)) for name in contest.solvers]
    return Memory(
        case,
        state=4 * rows(CASES[case]().z0).numel(),
        bare=contest.workers[0].ask("peak", case=case, solver=None, calls=3)["bytes"],
        rows=[row for row in found if row],
    )


def _measure(contest: Contest, case: str, solver: str) -> Row:
    return Row(
        solver,
        {
            worker.name: worker.ask("peak", case=case, solver=solver, calls=CALLS)["bytes"]
            for worker in contest.workers
            if solver in worker.solvers
        },
    )
