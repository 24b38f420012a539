"""How many launches, allocations, host reads and bytes does one evaluation cost beside `f`?

`python -m benchmarks.cost` renews `results/cost.json`, and `python -m tools.tables` the table in
`results/cost.md`. All figures are counts, so a busy machine gives the same ones as a quiet one.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from benchmarks.contest import OLD, OURS, Contest, Worker, open_contest
from benchmarks.help import answer_help
from benchmarks.metering import SIZES, STATES, STOPS, Cell
from benchmarks.storing import RESULTS, store
from benchmarks.table import render

DEVICES = ("cpu", "accelerator")
Figures = dict[str, float]


def cells(solvers: list[str], states: tuple[str, ...] = STATES) -> Iterator[Cell]:
    """Yield every row of the table."""
    for solver in solvers:
        for state in states:
            for size in SIZES:
                for stop in STOPS:
                    for device in DEVICES:
                        yield Cell(solver, state, size, stop, device)


def run(contest: Contest) -> dict[str, dict[str, Figures]]:
    """Return the figures by contestant and cell."""
    counts: dict[str, dict[str, Figures]] = {}
    for worker in contest.workers:
        table = {}
        for cell in cells(worker.solvers):
            if worker.name == OLD and cell.stop == "every 5":
                continue
            found = contest.attempt(partial(worker.ask, "count", **cell._asdict()))
            if found:
                table[cell.key] = found
        if worker.name == OURS:
            table |= _products(contest, worker)
        counts[worker.name] = table
    return counts


def _products(contest: Contest, worker: Worker) -> dict[str, Figures]:
    """Return the figures of the linear solvers."""
    table = {}
    for cell in cells(worker.ask("hello")["linear"], ("tensor",)):
        found = contest.attempt(partial(worker.ask, "count_products", **cell._asdict()))
        if found:
            table[cell.key] = found
    return table


def show(counts: dict[str, dict[str, Figures]]) -> str:
    """Return the table as text."""
    header = ["solver", "state", "size", "stop", "launches", OLD]
    header += ["allocations", OLD, "reads+writes", OLD, "device launches", "host reads", OLD]
    rows = []
    for key, cpu in counts[OURS].items():
        *names, device = key.split(", ")
        if device != "cpu":
            continue
        other = ", ".join((*names, "accelerator"))
        old, old_other = (counts.get(OLD, {}).get(k) for k in (key, other))
        accelerator = counts[OURS].get(other)
        cells_of_row = [*names]
        for name in ("launches", "allocations"):
            cells_of_row += [f"{cpu[name]:.1f}", f"{old[name]:.1f}" if old else "-"]
        cells_of_row += [_passes(cpu), _passes(old)]
        cells_of_row += [f"{accelerator['launches']:.1f}" if accelerator else "-"]
        cells_of_row += [
            f"{side['reads']:.2f}" if side else "-" for side in (accelerator, old_other)
        ]
        rows.append(cells_of_row)
    return render(header, rows, texts=4)


def _passes(figures: Figures | None) -> str:
    return f"{figures['read']:.1f}+{figures['written']:.1f}" if figures else "-"


def main() -> int:
    """Count, print and save; return an error code if ours failed anywhere."""
    with open_contest() as contest:
        counts = run(contest)
        failures = contest.failures
    text = show(counts)
    print(text)
    for failure in failures:
        print(f"FAILED: {failure}")
    store(RESULTS / "cost.json", {"counts": counts, "failures": failures}, seeds=[0], threads=1)
    return 1 if any(failure.startswith(OURS) for failure in failures) else 0


if __name__ == "__main__":
    answer_help(__doc__)
    raise SystemExit(main())
