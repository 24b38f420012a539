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
#: Maps of `benchmarks/rivals.py`.
CASES = {"mlp": "32 x 64", "wide": "32 x 1024", "cell": "64 x 256, hidden 1024"}


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
    """Return the states that a solve holds at its peak, ours and those of torchdeq 0.1.0."""
    found = read("solvers")["memory"]
    peaks = {row["solver"]: row["peak"] for row in found["rows"]}
    limited = read("recorded/broyden_memory")

    def states(solver: str) -> list[str]:
        both = (peaks[solver].get(who) for who in ("ours", "0.1.0"))
        return ["" if peak is None else f"{peak / found['state']:.0f}" for peak in both]

    rows = [
        ["one call of `f` alone", *[f"{found['bare'] / found['state']:.0f}"] * 2, ""],
        ["`simple_fixed_point_iter`", *states("simple_fixed_point_iter"), "nothing"],
        ["`fixed_point_iter`", *states("fixed_point_iter"), "nothing"],
        ["`anderson`, `m` = 6", *states("anderson"), "two states for each iterate of the window"],
        [
            f"`broyden`, `l_thres` = {limited['l_thres']}",
            str(limited["states"]),
            "",
            "two states for each term",
        ],
        [
            "`broyden`, all terms",
            *states("broyden"),
            "two states for each evaluation, and room to grow",
        ],
        [
            "`newton_krylov`, `inner` = 20",
            *states("newton_krylov"),
            "one state for each vector of the Krylov space",
        ],
        ["`auto`", *states("auto"), "that of the solvers it reaches"],
    ]
    return markdown(["Solver", "States at the peak", "In torchdeq 0.1.0", "Grows with"], rows)


@table("rivals")
def rivals() -> str:
    """Return the time of each contestant to a relative residual of 1e-5."""
    rows = read("rivals")["rows"]
    times = {
        (row["contestant"], row["case"]): f"{1e3 * row['time']['median']:.3g}"
        for row in rows
        if row["time"] is not None
    }
    lines = [
        [name, *(times.get((name, case), "not reached") for case in CASES)]
        for name in dict.fromkeys(row["contestant"] for row in rows)
    ]
    return markdown(["Milliseconds", *CASES.values()], lines)


@table("rival_evaluations")
def rival_evaluations() -> str:
    """Return the evaluations of our own solvers on the maps of the rivals."""
    counts = {(r["contestant"], r["case"]): r for r in read("rival_evaluations")["rows"]}
    names = dict.fromkeys(name for name, _ in counts)
    rows = [[n, *(str(counts[n, case]["evaluations"]) for case in CASES)] for n in names]
    return markdown(["Evaluations", *CASES.values()], rows)


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


@table("solvers")
def overhead() -> str:
    """Return our time relative to that of torchdeq 0.1.0 for the same calls of f."""
    found = read("solvers")
    rows = {
        (row["case"], row["solver"]): row["cost"]
        for row in found["overhead"]["rows"]
        if row["ratio"] is not None
    }

    def cell(case: str, solver: str) -> str:
        ours, old = (rows[case, solver][who]["total"]["median"] for who in ("ours", "0.1.0"))
        return f"{ours / old:.2f}"

    plain = list(SOLVERS)[:3]
    lines = [[shown, *(cell(case, solver) for solver in plain)] for case, shown in MAPS.items()]
    mean = f"{1 / found['geometric_mean']['rounds']:.2f}"
    lines.append([f"geometric mean without the last map: {mean}", *[""] * len(plain)])
    return markdown(["Map", *(SOLVERS[name] for name in plain)], lines)


@table("gradients", "solvers", "cost")
def beside_release() -> str:
    """Return what torchdeq 0.1.0 needs and what this version needs, for the same work."""
    names = dict(list(SOLVERS.items())[:3])
    shown = " / ".join(names.values())
    memory_of = {row["solver"]: row["peak"] for row in read("solvers")["memory"]["rows"]}
    state = read("solvers")["memory"]["state"]
    counts = read("cost")["counts"]

    def launches(who: str) -> str:
        return " / ".join(
            f"{counts[who][f'{n}, tensor, small, tolerance, cpu']['launches']:.0f}" for n in names
        )

    def peaks(who: str) -> str:
        return " / ".join(f"{memory_of[name][who] / state:.0f}" for name in names)

    rows = [
        [f"time of a training step to the same residuals, {MAPS[case]}", "1",
         f"{ratio:.2f} ({1 / ratio:.1f} times as fast)",
         "[gradients](gradients.md#what-it-costs)"]
        for case, ratio in training_ratios().items()
    ]  # fmt: skip
    rows += [
        ["time of 30 evaluations, geometric mean of five maps and three solvers", "1",
         f"{1 / read('solvers')['geometric_mean']['rounds']:.2f}",
         "[benchmarks](benchmarks.md#beside-torchdeq-010-at-equal-calls)"],
        [f"operators beside `f` in an evaluation, {shown}", launches("0.1.0"), launches("ours"),
         "[design](design.md#decisions-on-the-host-states-on-the-device)"],
        [f"states at the peak of a solve, {shown}", peaks("0.1.0"), peaks("ours"),
         "[memory](memory.md)"],
    ]  # fmt: skip
    return markdown(["Measured", "torchdeq 0.1.0", "Now", "How"], rows)


def training_ratios() -> dict[str, float]:
    """Return, by map, the time of a training step relative to that of torchdeq 0.1.0.

    The median over rounds of one ratio each, so that noise of the machine hits both times: GMRES,
    our default, beside the faster of the adjoints of 0.1.0.
    """
    return {
        run["case"]: run["ratio"]["median"]
        for run in read("gradients")["training"]["runs"]
        if (run["contestant"], run["adjoint"]) == ("ours", "gmres")
    }


@table("left")
def left() -> str:
    """Return the microseconds of one evaluation by part: f, operators of torch, Python."""
    rows = [
        [
            f"{SOLVERS[row['solver']]}, {row['stop']}",
            *(f"{max(0.0, row[part]):.0f}" for part in ("total", "f", "operators", "python")),
            ", ".join(f"`{name}` {time:.0f}" for name, time in row["largest"].items()),
        ]
        for row in read("left")["rows"]
    ]
    header = ["Solver", "Whole", "`f`", "Operators beside `f`", "Python", "Largest operators"]
    return markdown(header, rows)


@table("startup")
def startup() -> str:
    """Return the seconds of first commands."""
    seconds = read("startup")["seconds"]
    return markdown(["Process", "Seconds"], [[name, f"{s:.2f}"] for name, s in seconds.items()])


@table("choices")
def compiling() -> str:
    """Return the time of a training step with a compiled f."""
    rows = read("choices")["compiled"]
    return markdown(
        ["Map", "Time of a training step with a compiled `f`, relative to a plain one"],
        [[row["map"], f"{row['ratio']:.2f}"] for row in rows],
    )


@table("choices")
def compacting() -> str:
    """Return how much faster a batch is whose finished samples leave."""
    rows = read("choices")["compacted"]
    by_size = {
        row["operations"]: {r["hard"]: r for r in rows if r["operations"] == row["operations"]}
        for row in rows
    }
    return markdown(
        ["Operations of an evaluation", "Speed-up, one of 32 is hard", "Speed-up, all are equal"],
        [
            [f"{n / 1e6:.1f} million", f"{pair[1]['speed_up']:.2f}", f"{pair[0]['speed_up']:.2f}"]
            for n, pair in by_size.items()
        ],
    )


@table("serving")
def serving() -> str:
    """Return how a server answers under a load."""
    got = read("serving")
    before, after = got["resident_mb"]
    rows = [
        ["requests; at a time", f"{got['requests']:,}; {got['at_a_time']}"],
        *([_request(name), f"{number:,}"] for name, number in got["outcomes"].items()),
        ["answers with another status than expected", str(got["unexpected"])],
        ["requests per second", f"{got['per_second']:.0f}"],
        ["latency, median and 99th percentile", f"{got['p50_ms']:.0f} and {got['p99_ms']:.0f} ms"],
        ["memory of the server, before and after", f"{before:.0f} and {after:.0f} MB"],
        ["SIGTERM to the end of the process", f"{got['stop_seconds']:.1f} s"],
    ]
    return markdown(["", "Measured"], rows)


def _request(outcome: str) -> str:
    """Return a kind of requests and how they ended, from `KIND: STATUS` or `leaving: left`."""
    kind, _, end = outcome.partition(": ")
    if end == "left":
        return "clients that left before the answer"
    return f"{kind} requests, status {end}" if kind == "good" else f"{kind}, status {end}"
