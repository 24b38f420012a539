"""Tables about the solvers of the library: time, evaluations, memory, graphs, streams, batches."""

from __future__ import annotations

from typing import Any

from benchmarks.cost import show
from tools.tables.frame import markdown, read, table

#: Maps of `benchmarks/cases.py` and solvers, with the names that readers know.
MAPS = {
    "mlp": "one layer, 32 x 64", "mlp-wide": "one layer, 32 x 4096", "conv": "convolution",
    "attention": "attention", "chain": "chain of 1000", "pair": "two tensors",
}  # fmt: skip
SOLVERS = {
    "fixed_point_iter": "plain", "anderson": "Anderson", "broyden": "Broyden",
    "newton_krylov": "Newton-Krylov",
}  # fmt: skip


def solved(case: str, solver: str, tol: float) -> dict[str, Any]:
    """Return our run of a solver on a map to a tolerance."""
    (row,) = (
        row for row in read("solvers")["to_tolerance"]["rows"]
        if (row["case"], row["solver"]) == (case, solver)
    )  # fmt: skip
    (run,) = (run for run in row["runs"]["ours"] if run["tol"] == tol)
    found: dict[str, Any] = run
    return found


def milliseconds(seconds: float) -> str:
    """Return milliseconds, with a decimal if they are few."""
    return f"{1e3 * seconds:.{1 if seconds < 0.02 else 0}f}"


@table("solvers")
def solvers() -> str:
    """Return evaluations and time to a relative residual of 1e-5, by map and solver."""

    def cell(case: str, solver: str) -> str:
        run = solved(case, solver, 1e-5)
        assert run["claimed"] <= run["tol"], (case, solver)
        return f"{run['calls']} ({milliseconds(run['seconds']['median'])})"

    rows = [[shown, *(cell(case, solver) for solver in SOLVERS)] for case, shown in MAPS.items()]
    return markdown(["Map", *SOLVERS.values()], rows)


@table("solvers", "recorded/broyden_memory")
def memory() -> str:
    """Return the states that a solve holds at its peak."""
    found = read("solvers")["memory"]
    states = {row["solver"]: f"{row['peak']['ours'] / found['state']:.0f}" for row in found["rows"]}
    limited = read("recorded/broyden_memory")
    rows = [
        ["one call of `f` alone", f"{found['bare'] / found['state']:.0f}", ""],
        ["`fixed_point_iter`", states["fixed_point_iter"], "nothing"],
        ["`anderson`, `m` = 6", states["anderson"], "two states for each iterate of the window"],
        [
            f"`broyden`, `l_thres` = {limited['l_thres']}",
            str(limited["states"]),
            "two states for each term",
        ],
        [
            "`broyden`, all terms",
            states["broyden"],
            "two states for each evaluation, and room to grow",
        ],
        [
            "`newton_krylov`, `inner` = 20",
            states["newton_krylov"],
            "one state for each vector of the Krylov space",
        ],
        ["`auto`", states["auto"], "that of the solvers it reaches"],
    ]
    return markdown(["Solver", "States at the peak", "Grows with"], rows)


@table("rivals")
def rivals() -> str:
    """Return the time of each contestant to a relative residual of 1e-5."""
    cases = {"mlp": "32 x 64", "wide": "32 x 1024", "cell": "64 x 256, hidden 1024"}
    rows = read("rivals")["rows"]
    times = {
        (row["contestant"], row["case"]): f"{1e3 * row['time']['median']:.3g}"
        for row in rows
        if row["time"] is not None
    }
    lines = [
        [name, *(times.get((name, case), "not reached") for case in cases)]
        for name in dict.fromkeys(row["contestant"] for row in rows)
    ]
    return markdown(["Milliseconds", *cases.values()], lines)


@table("one_graph")
def one_graph() -> str:
    """Return microseconds for an evaluation of a small map, by the way of solving."""
    return markdown(
        ["", "Microseconds per evaluation", "Relative to bare `f`"],
        [
            [row["name"], f"{row['micros']['median']:.1f}", f"{row['to_bare']['median']:.2f}"]
            for row in read("one_graph")["rows"]
        ],
    )


@table("stream")
def stream() -> str:
    """Return evaluations and time of streams against fixed batches."""
    return markdown(
        ["Load", "Solver", "Slots", "Useful share, fixed", "Useful share, stream", "Speed-up"],
        [
            [
                row["load"],
                row["solver"],
                str(row["slots"]),
                f"{row['useful'] / row['fixed']:.2f}",
                f"{row['useful'] / row['stream']:.2f}",
                f"{row['ratio']:.2f}",
            ]
            for row in read("stream")["rows"]
        ],
    )


@table("cost")
def cost() -> str:
    """Return launches, allocations, bytes and reads of one evaluation beside `f`."""
    return f"```text\n{show(read('cost')['counts'])}\n```"


@table("loading")
def loading() -> str:
    """Return images per second by loader, for an idle and a busy consumer."""
    loaders = {"no worker": "In the training process", "2 threads": "2 threads",
               "1 worker": "1 worker", "2 workers": "2 workers"}  # fmt: skip
    rates = {
        (row["consumer"], row["loader"]): f"{row['images_per_s'][1]:.0f}"
        for row in read("loading")["rows"]
    }
    return markdown(
        ["Consumer", *loaders.values()],
        [[who, *(rates[who, loader] for loader in loaders)] for who in ("idle", "busy")],
    )
