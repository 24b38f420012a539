"""Numbers in sentences: phrases, computed from results, that pages must contain.

`PHRASES` has, by page, functions that yield phrases as they should be read; a test compares them
with the pages. A sentence is written by hand and only checked, so its phrase is short: the number
and the words that say what it is. Phrases of the families are in `family_sentences.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from tools.tables.frame import read
from tools.tables.library import training_ratios

Make = Callable[[], Iterator[str]]
PHRASES: dict[str, list[Make]] = defaultdict(list)

_FRACTIONS = {
    "a tenth": 0.1, "a fifth": 0.2, "a quarter": 0.25, "a third": 1 / 3, "two fifths": 0.4,
    "half": 0.5, "three fifths": 0.6, "two thirds": 2 / 3, "three quarters": 0.75, "all": 1.0,
}  # fmt: skip


def phrases(page: str) -> Callable[[Make], Make]:
    """Add a function that yields phrases to those of a page, which is a path in the repository."""

    def add(make: Make) -> Make:
        PHRASES[page].append(make)
        return make

    return add


def missing(page: str, text: str) -> list[str]:
    """Return the phrases that the text of a page lacks, white space folded."""
    folded = " ".join(text.split())
    wanted = (phrase for make in PHRASES[page] for phrase in make())
    return [phrase for phrase in wanted if phrase not in folded]


def claim(holds: bool, phrase: str) -> str:
    """Return a phrase without a number, or that it does not hold any longer."""
    return phrase if holds else f"(no longer true: {phrase})"


def fraction(value: float) -> str:
    """Return the nearest fraction that has a name."""
    return min(_FRACTIONS, key=lambda name: abs(_FRACTIONS[name] - value))


def solved_mazes(side: int) -> float:
    """Return the percentage of mazes of a side that `reason-mazes` solves in the most steps."""
    rows = [r for key, r in read("reason/sides")["rows"].items() if key.startswith(f"{side},")]
    exact: float = max(rows, key=lambda row: int(row["steps"]))["exact"]
    return exact


@phrases("README.md")
def _front() -> Iterator[str]:
    network = f"a network of {read('card:reason-mazes').parameters:,} parameters"
    yield f"{network}, trained on mazes of 13x13 only"
    yield f"as it does about {fraction(solved_mazes(31) / 100)} of that size"


def _left(solver: str) -> dict[str, Any]:
    (row,) = (
        row
        for row in read("left")["rows"]
        if (row["solver"], row["stop"]) == (solver, "without a tolerance")
    )
    found: dict[str, Any] = row
    return found


@phrases("docs/benchmarks.md")
def _of_a_step() -> Iterator[str]:
    plain, anderson = _left("fixed_point_iter"), _left("anderson")
    algebra = anderson["largest"]["linalg_solve_ex"] + anderson["largest"]["bmm"]
    yield (
        "Plain iteration without a tolerance costs "
        f"{plain['total'] / plain['f']:.1f} times the map alone"
    )
    yield (
        "The largest part of Anderson's own time, "
        f"{fraction(algebra / (anderson['total'] - anderson['f']))} without a tolerance"
    )


@phrases("docs/benchmarks.md")
def _loading() -> Iterator[str]:
    rates = {r["loader"]: r["images_per_s"][1] for r in read("loading")["rows"]
             if r["consumer"] == "busy"}  # fmt: skip
    yield (
        f"one worker process makes {rates['1 worker'] / rates['2 threads']:.1f} times as many "
        "images as two threads"
    )


@phrases("docs/benchmarks.md")
def _rivals() -> Iterator[str]:
    times = {
        (row["case"], row["contestant"]): row["time"]["median"]
        for row in read("rivals")["rows"]
        if row["time"] is not None
    }
    jitted = ("jaxopt plain", "jaxopt anderson", "optimistix plain")
    ours = [time for (case, who), time in times.items() if case == "mlp" and "ours" in who]
    theirs = [times["mlp", who] for who in jitted]
    least, most = min(ours) / max(theirs), max(ours) / min(theirs)
    yield f"jitted loops win by a factor of {least:.0f} to {most:.0f}"
    plain = times["cell", "ours fixed_point_iter"]
    yield (
        "plain iteration loses** to the jitted one by a factor of "
        f"{plain / times['cell', 'jaxopt plain']:.1f}"
    )


@phrases("docs/benchmarks.md")
def _rival_evaluations() -> Iterator[str]:
    counts = {(r["case"], r["contestant"]): r["evaluations"]
              for r in read("rival_evaluations")["rows"]}  # fmt: skip

    def shares(case: str) -> list[float]:
        plain = counts[case, "ours fixed_point_iter"]
        return [counts[case, f"ours {name}"] / plain for name in ("anderson", "broyden")]

    few = "Anderson and Broyden take less than half as many as plain iteration"
    yield claim(max(shares("wide")) < 0.5, few)
    (part,) = {fraction(share) for share in shares("cell")}
    yield f"Anderson and Broyden need about {part} the evaluations"


@phrases("docs/gradients.md")
def _training() -> Iterator[str]:
    runs = {
        (run["case"], run["adjoint"]): run
        for run in read("gradients")["training"]["runs"]
        if run["contestant"] == "0.1.0"
    }
    names = {"anderson": "Anderson", "broyden": "Broyden"}
    faster = {
        case: names[min(names, key=lambda name: runs[case, name]["seconds"]["median"])]
        for case in training_ratios()
    }
    yield f"{faster['conv']} for the convolution, {faster['attention']} for attention."


@phrases("docs/memory.md")
def _memory() -> Iterator[str]:
    found = read("solvers")["memory"]
    (row,) = (row for row in found["rows"] if row["solver"] == "simple_fixed_point_iter")
    more = (row["peak"]["ours"] - row["peak"]["0.1.0"]) / found["state"]
    yield claim(round(more) == 1, "the second by one state")


@phrases("docs/simulated_scale.md")
def _scale() -> Iterator[str]:
    counts = read("simulated_scale")["counts"]
    yield f"needs {counts['evaluations']} and {counts['products']} after 150 updates"
