"""Tables of the reasoners: gradients, restarts, depth and boards beyond training, whole runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tools.tables.frame import markdown, power, read, table

Row = dict[str, Any]

HALTS = {"residual": "the residual", "head": "the head", "both": "both"}
GRADIENTS = {
    "one step": "the last two steps, as HRM",
    "round": "the last round, as TRM and EqR",
    "phantom": "the whole last supervision step",
    "reversible": "reversible iteration, two supervision steps",
    "implicit": "implicit, GMRES with 12 products",
}


@table("reason/gradients")
def reason_gradients() -> str:
    """Return what each gradient teaches in the same time on 6x6 Sudokus."""
    return _compare("reason/gradients")


@table("reason/mazes")
def reason_maze_gradients() -> str:
    """Return what each gradient teaches in the same time on mazes."""
    return _compare("reason/mazes")


@table("reason/larger")
def reason_larger() -> str:
    """Return what each gradient's runs answer on mazes larger than those of training."""
    return markdown(
        ["gradient through", "exact, %", "cells, %", "relative residual"],
        [
            [words, _all(runs, "exact", 0), _all(runs, "cells"), _residuals(runs)]
            for words, runs in _by_gradient("reason/larger")
        ],
    )


def _compare(part: str) -> str:
    """Return accuracy, residual, time and memory of the runs of each gradient."""
    return markdown(
        ["gradient through", "exact, %", "4x deeper", "cells, %", "relative residual",
         "spectral radius", "updates", "ms an update", "peak memory, MB"],
        [
            [
                words,
                _all(runs, "exact"),
                _all(runs, "exact at 4x"),
                _all(runs, "cells"),
                _residuals(runs),
                _all(runs, "spectral_radius", 2),
                _all(runs, "updates", 0),
                _all(runs, "ms_per_step", 0),
                _all(runs, "peak_mb", 0),
            ]
            for words, runs in _by_gradient(part)
        ],
    )  # fmt: skip


def _by_gradient(part: str) -> Iterator[tuple[str, list[Row]]]:
    """Yield each gradient in words, and its runs in the order of their seeds."""
    rows = read(part)["rows"]
    for rule, words in GRADIENTS.items():
        yield words, [row for key, row in sorted(rows.items()) if f", {rule}, " in key]


def _all(runs: list[Row], key: str, digits: int = 1) -> str:
    return ", ".join(f"{run[key]:.{digits}f}" for run in runs)


def _residuals(runs: list[Row]) -> str:
    return ", ".join(power(run["residual"]) for run in runs)


@table("reason/halting")
def reason_restarts() -> str:
    """Return accuracy and evaluations of restarts for all puzzles, and of streams."""
    rows = read("reason/halting")["rows"]
    every = rows["all restarts"]
    starts, spent = every["starts"], f"{every['evaluations']:.0f}"
    one, settled, frequent, known = (f"{every[key]:.1f}" for key in ("one", "top1", "vote", "any"))
    lines = [
        [
            "one full solve, mean of the starts",
            "",
            one,
            one,
            f"{every['evaluations'] / starts:.0f}",
        ],
        [f"{starts} full solves", "", settled, frequent, spent],
        [f"{starts} full solves, chosen by the solution", "", known, known, spent],
    ]
    streams = {key.rpartition(", ")[0] for key in rows if key != "all restarts"}
    for key in sorted(streams, key=lambda key: rows[f"{key}, vote"]["evaluations"]):
        _, halt, tol = key.split(", ")
        settled, frequent = (
            f"{rows[f'{key}, {way}']['exact']:.1f}" for way in ("residual", "vote")
        )
        goal = "" if halt == "head" else tol
        cost = f"{rows[f'{key}, vote']['evaluations']:.1f}"
        lines.append([f"stream, halting by {HALTS[halt]}", goal, settled, frequent, cost])
    return markdown(
        ["attempts", "tolerance", "exact, %: the most settled", "the most frequent",
         "evaluations for a puzzle"],
        lines,
    )  # fmt: skip


@table("reason/depth")
def reason_depth() -> str:
    """Return accuracy and residual at multiples of the depth of training."""
    rows = read("reason/depth")["rows"]
    return markdown(
        ["supervision steps", "exact, %", "relative residual", "right answers below wrong ones, %"],
        [
            [
                f"{row['evaluations']:.0f} ({name})",
                f"{row['exact']:.1f}",
                power(row["residual"], 1),
                f"{row['confidence']:.1f}",
            ]
            for name, row in sorted(rows.items(), key=lambda item: item[1]["evaluations"])
        ],
    )


@table("reason/sides")
def reason_sides() -> str:
    """Return accuracy on larger mazes, by the depth of the recursion."""
    rows = read("reason/sides")["rows"].items()
    by_place = {(int(key.partition(",")[0]), row["steps"]): row for key, row in rows}
    sides, steps = (sorted(set(values)) for values in zip(*by_place, strict=True))
    return markdown(
        ["mazes", "moves of a path", *(f"exact after {count} steps, %" for count in steps)],
        [
            [
                f"{side} x {side}",
                "{} to {}".format(*by_place[side, steps[0]]["paths"]),
                *(f"{by_place[side, count]['exact']:.0f}" for count in steps),
            ]
            for side in sides
        ],
    )


@table("reason/quick")
def reason_quick() -> str:
    """Return whole runs of `reason-quick`."""
    rows = read("reason/quick")["rows"]
    return markdown(
        ["seed", "exact, %", "cells, %", "spectral radius", "right answers below wrong ones, %",
         "best update", "processor seconds"],
        [
            [
                seed,
                f"{row['exact']:.1f}",
                f"{row['cells']:.1f}",
                f"{row['spectral_radius']:.2f}",
                f"{row['confidence']:.1f}",
                f"{row['best_update']}",
                f"{row['seconds']:.0f}",
            ]
            for seed, row in sorted(rows.items())
        ],
    )  # fmt: skip


@table("reason/nine")
def reason_nine() -> str:
    """Return the learning curve on 9x9 Sudokus, and the score of the last weights."""
    (row,) = read("reason/nine")["rows"].values()
    points = row["curve"][2::3]  # eight of them: a page has no room for more
    lines = [
        ["processor minutes", *(f"{point['seconds'] / 60:.0f}" for point in points), "test"],
        ["updates", *(f"{point['updates']:,}" for point in points), f"{row['updates']:,}"],
        ["exact, %", *(f"{point['exact']:.1f}" for point in points), f"{row['exact']:.1f}"],
        ["cells, %", *(f"{point['cells']:.1f}" for point in points), f"{row['cells']:.1f}"],
    ]
    return markdown(lines[0], lines[1:])
