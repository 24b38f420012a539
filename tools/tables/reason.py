"""Tables of the reasoners: halting and restarts, and depth beyond training."""

from __future__ import annotations

from tools.tables.frame import markdown, power, read, table

HALTS = {"residual": "the residual", "head": "the head", "both": "both"}


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
            for name, row in rows.items()
        ],
    )
