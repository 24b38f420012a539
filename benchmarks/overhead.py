"""What does a solver itself cost? Its time beyond that of the same number of plain calls of f."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from statistics import geometric_mean

from benchmarks.contest import OLD, OURS, CellFailed, Contest, interleave
from benchmarks.spread import Spread
from benchmarks.table import render

CALLS = 30
SAMPLE = 0.05  # seconds that one measurement should take at least
SCORED = ("mlp", "mlp-wide", "conv", "attention", "chain")  # a tuple state stays out of the mean
RULES = ("fixed_point_iter", "anderson", "broyden")


@dataclass(frozen=True)
class Cost:
    """The seconds of one contestant's solve."""

    total: Spread
    bare: Spread
    extra: Spread  # of total - bare by round

    @property
    def per_call(self) -> str:
        """Return the microseconds beyond f at each evaluation."""
        return f"{self.extra.tilde}{1e6 * self.extra.median / CALLS:.1f}"


@dataclass(frozen=True)
class Row:
    """One solver on one problem."""

    case: str
    solver: str
    cost: dict[str, Cost]
    ratio: Spread | None  # time of 0.1.0 over ours, by round


@dataclass(frozen=True)
class Overhead:
    """The answer."""

    rows: list[Row]
    reading: Spread | None  # seconds to look at the statistics of ours, by round

    @property
    def scored(self) -> list[Row]:
        """Return the rows over which the geometric mean is computed."""
        return [r for r in self.rows if r.case in SCORED and r.solver in RULES and r.ratio]

    @property
    def mean(self) -> float | None:
        """Return the geometric mean of old over ours, from rounds."""
        ratios = [row.ratio.median for row in self.scored if row.ratio]
        return geometric_mean(ratios) if ratios else None

    @property
    def mean_low(self) -> float | None:
        """Return the geometric mean of old over ours, from the shortest time of each."""
        ratios = [row.cost[OLD].total.low / row.cost[OURS].total.low for row in self.scored]
        return geometric_mean(ratios) if ratios else None

    def by_case(self) -> Iterator[tuple[str, float, float]]:
        """Case by case: old over ours for the whole time, and for the extra time of all rules."""
        for case in dict.fromkeys(row.case for row in self.rows):
            rows = [r for r in self.rows if r.case == case and r.solver in RULES and r.ratio]
            if rows:
                extra = {who: sum(r.cost[who].extra.median for r in rows) for who in (OLD, OURS)}
                time = geometric_mean(r.ratio.median for r in rows if r.ratio)
                yield case, time, extra[OLD] / extra[OURS]

    def __str__(self) -> str:
        header = ["case", "solver", "f alone ms"]
        for who in (OURS, OLD):
            header += [f"{who} ms", "min", "iqr"]
        header += [f"{OLD}/{OURS}", f"{OURS} extra us/call", OLD, "ratio"]
        parts = [
            f"OVERHEAD: {CALLS} evaluations of f, counted, no tolerance, default options; medians",
            render(header, [_cells(row) for row in self.rows], texts=2),
            "extra: time beyond the same number of plain calls of f; ~ noise larger than the value",
        ]
        if self.reading:
            parts.append(
                "reading the statistics of ours, computed when first looked at, adds "
                f"{self.reading.tilde}{1e6 * self.reading.median:.0f} us to a solve (mlp, anderson)"
            )
        parts += [
            f"  {case}: time {OLD}/{OURS} {time:.2f}, extra time {OLD}/{OURS} {extra:.1f}"
            for case, time, extra in self.by_case()
        ]
        if self.mean:
            parts.append(
                f"GEOMETRIC MEAN of time {OLD}/{OURS} over {len(self.scored)} cells: "
                f"{self.mean:.2f} (of minima: {self.mean_low:.2f})"
            )
        return "\n".join(parts)


def run(contest: Contest, cases: list[str], rounds: int) -> Overhead:
    """Measure every solver on every case."""
    cells = [(case, solver) for case in cases for solver in contest.solvers]
    rows = [
        contest.attempt(partial(_measure, contest, case, solver, rounds)) for case, solver in cells
    ]
    reading = contest.attempt(partial(_reading, contest, rounds)) if "mlp" in cases else None
    return Overhead([row for row in rows if row], reading)


def _measure(contest: Contest, case: str, solver: str, rounds: int) -> Row:
    turns = {}
    for worker in contest.workers:
        if solver not in worker.solvers:
            continue
        seen = worker.ask("check", case=case, solver=solver, calls=CALLS, tol=0.0)
        if seen["calls"] != CALLS:
            raise CellFailed(
                f"{worker.name}, {case}, {solver}: {seen['calls']} evaluations, expected {CALLS}"
            )
        what = {"case": case, "solver": solver, "calls": CALLS, "least": SAMPLE}
        turns[worker.name] = partial(worker.ask, "compare", **what)
    answers = interleave(turns, rounds, seconds=7, least=3)
    cost = {
        name: Cost(
            Spread.of([a["seconds"] for a in got]),
            Spread.of([a["bare"] for a in got]),
            Spread.of([a["seconds"] - a["bare"] for a in got]),
        )
        for name, got in answers.items()
    }
    ratio = None
    if OLD in answers:
        pairs = zip(answers[OLD], answers[OURS], strict=True)
        ratio = Spread.of([old["seconds"] / ours["seconds"] for old, ours in pairs])
    return Row(case, solver, cost, ratio)


def _reading(contest: Contest, rounds: int) -> Spread:
    """Measure the time to read the statistics of a solve."""
    what = {"case": "mlp", "solver": "anderson", "calls": CALLS, "least": SAMPLE}
    ask = contest.workers[0].ask
    turns = {"read": partial(ask, "read", **what), "not": partial(ask, "time", tol=0.0, **what)}
    got = interleave(turns, rounds, seconds=5, least=3)
    pairs = zip(got["read"], got["not"], strict=True)
    return Spread.of([read["seconds"] - unread["seconds"] for read, unread in pairs])


def _cells(row: Row) -> list[str]:
    cells = [row.case, row.solver, f"{1e3 * row.cost[OURS].bare.median:.2f}"]
    for who in (OURS, OLD):
        if who in row.cost:
            total = row.cost[who].total
            cells += [f"{1e3 * total.median:.2f}", f"{1e3 * total.low:.2f}", total.percent]
        else:
            cells += ["-", "-", "-"]
    if row.ratio is None:
        return [*cells, "-", row.cost[OURS].per_call, "-", "-"]
    ours, old = row.cost[OURS], row.cost[OLD]
    unclear = "~" if row.ratio.q1 <= 1 <= row.ratio.q3 else ""
    extra = old.extra.median / ours.extra.median if ours.extra.median > 0 else float("nan")
    extra_text = "~" if "~" in ours.per_call + old.per_call else f"{extra:.1f}"
    return [*cells, f"{unclear}{row.ratio.median:.2f}", ours.per_call, old.per_call, extra_text]
