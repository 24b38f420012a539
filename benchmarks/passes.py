"""What do time and memory of a forward and backward pass cost, by method of differentiation?"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from functools import partial

from benchmarks.cases import CASES, rows
from benchmarks.contest import ROOT, Contest, Worker, interleave
from benchmarks.ours import METHODS
from benchmarks.spread import Spread
from benchmarks.table import render

SAMPLE = 0.2  # seconds that one measurement should take at least
BASE = "unrolled 20"
CELLS = ("cell", "conv")


@dataclass(frozen=True)
class Row:
    """One method on one problem."""

    case: str
    method: str
    calls: int  # of f, those of the backward pass included
    products: int  # calls of its backward
    seconds: Spread
    ratio: Spread  # to unrolling, by round
    held: int  # bytes that the graph keeps between the passes
    peak: int  # most bytes of live tensors
    resident: int  # growth of the process in bytes


@dataclass(frozen=True)
class Passes:
    """The answer."""

    states: dict[str, int]  # bytes of one state, by case
    rows: list[Row]

    def __str__(self) -> str:
        header = ["case", "method", "calls of f", "of its backward", "ms", "iqr", "/unrolled"]
        header += ["graph MB", "states", "peak MB", "resident MB"]
        sizes = ", ".join(f"{case} {size / 1e6:.2f} MB" for case, size in self.states.items())
        return "\n".join(
            (
                f"PASSES: forward and backward of one layer; medians (one state: {sizes})",
                render(header, [self._cells(row) for row in self.rows], texts=2),
                "calls in both passes; graph: what it keeps in between, beside weights and start;",
                "peak: most bytes of live tensors; resident: growth of a process of its own",
            )
        )

    def _cells(self, row: Row) -> list[str]:
        cells = [row.case, row.method, str(row.calls), str(row.products)]
        cells += [f"{1e3 * row.seconds.median:.1f}", row.seconds.percent]
        cells += [f"{row.ratio.median:.2f}", f"{row.held / 1e6:.1f}"]
        cells.append(f"{row.held / self.states[row.case]:.1f}")
        return [*cells, f"{row.peak / 1e6:.0f}", f"{row.resident / 1e6:.0f}"]


def run(contest: Contest, rounds: int, quick: bool) -> Passes:
    """Measure every method, in turns."""
    cases = CELLS[1:] if quick else CELLS
    found = [contest.attempt(partial(_measure, contest.workers[0], case, rounds)) for case in cases]
    states = {case: 4 * rows(CASES[case]().z0).numel() for case in cases}
    return Passes(states, [row for group in found if group for row in group])


def _measure(ours: Worker, case: str, rounds: int) -> list[Row]:
    seen = {name: ours.ask("count_pass", case=case, method=name) for name in METHODS}
    turns = {
        name: partial(ours.ask, "time_pass", case=case, method=name, least=SAMPLE)
        for name in METHODS
    }
    answers = interleave(turns, rounds, seconds=120, least=3)
    times = {name: [a["seconds"] for a in got] for name, got in answers.items()}
    return [
        Row(
            case,
            name,
            **seen[name],
            seconds=Spread.of(times[name]),
            ratio=Spread.of([a / b for a, b in zip(times[name], times[BASE], strict=True)]),
            resident=_resident(case, name),
        )
        for name in METHODS
    ]


def _resident(case: str, method: str) -> int:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.resident", case, method],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return int(done.stdout)
