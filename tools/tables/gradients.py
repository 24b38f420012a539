"""Tables about gradients, as the benchmark prints them and as the page about choices needs them."""

from __future__ import annotations

from typing import Any

from benchmarks import adjoint as adjoints
from benchmarks import passes as methods
from benchmarks import training as steps
from benchmarks.spread import Spread
from tools.tables.frame import markdown, read, table

RADII = (0.5, 0.9, 0.99)


def _text(answer: object) -> str:
    return f"```text\n{answer}\n```"


def _spreads(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with its samples as `Spread`."""
    both = {name: row[name] and Spread(**row[name]) for name in ("seconds", "ratio")}
    return {**row, **both}


@table("gradients")
def adjoint() -> str:
    """Return products of every adjoint solver, and cosines of phantom gradients."""
    found = read("gradients")["adjoint"]
    rows = [
        adjoints.Row(
            row["contestant"], row["solver"], [run and adjoints.Run(**run) for run in row["runs"]]
        )
        for row in found["rows"]
    ]
    cosines = {int(count): values for count, values in found["cosines"].items()}
    return _text(adjoints.Adjoint([(s, r) for s, r in found["columns"]], rows, cosines))


@table("gradients")
def passes() -> str:
    """Return time and memory of both passes, by method of differentiation."""
    found = read("gradients")["passes"]
    rows = [methods.Row(**_spreads(row)) for row in found["rows"]]
    return _text(methods.Passes(found["states"], rows))


@table("gradients")
def training() -> str:
    """Return the time of a training step beside torchdeq 0.1.0."""
    runs = [steps.Run(**_spreads(run)) for run in read("gradients")["training"]["runs"]]
    return _text(steps.Training(runs))


def cosine(count: int, radius: float, spectrum: str = "disk") -> float:
    """Return the lowest cosine of a phantom gradient with the exact one."""
    found = read("gradients")["adjoint"]
    value: float = found["cosines"][str(count)][found["columns"].index([spectrum, radius])]
    return value


def products(solver: str, radius: float, spectrum: str = "disk") -> int | None:
    """Return the products of an adjoint solver, None if it did not reach the tolerance."""
    found = read("gradients")["adjoint"]
    (row,) = (
        r for r in found["rows"] if (r["contestant"], r["solver"]) == ("ours", solver)
    )  # fmt: skip
    run = adjoints.Run(**row["runs"][found["columns"].index([spectrum, radius])])
    return run.products if run.reached else None


@table("gradients")
def phantom_cosines() -> str:
    """Return how near phantom gradients come to the exact one, by the spectral radius."""
    return markdown(
        ["Steps", *map(str, RADII)],
        [[str(k), *(f"{cosine(k, r):.2f}" for r in RADII)] for k in (1, 5, 10)],
    )


@table("gradients")
def adjoint_products() -> str:
    """Return the products of adjoint solvers by the spectral radius."""
    names = {name: f"`{name}`" for name in ("gmres", "broyden", "anderson", "bicgstab")}
    names["fixed_point_iter"] = "`fixed_point_iter`, `neumann`"
    rows = []
    for solver, shown in names.items():
        counts = [products(solver, radius) for radius in RADII]
        assert solver != "fixed_point_iter" or counts == [products("neumann", r) for r in RADII]
        missed = f"not in {adjoints.BUDGET}"
        rows.append([shown, *(missed if n is None else str(n) for n in counts)])
    return markdown(["Solver", f"radius {RADII[0]}", *map(str, RADII[1:])], rows)
