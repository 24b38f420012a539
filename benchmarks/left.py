"""What is left of a solver step? Its time beyond f, split into operations of torch and Python.

A solve of 30 evaluations of one layer, 32 x 64, is timed as it is. A second run under torch's
profiler has the time inside operators; those that run inside `f` are taken out. The rest is Python:
the loop, the judge on the host, the check for writes of `f`. The profiler makes operators look
slower by some tenths of a microsecond each, so the share of Python is a lower bound.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import process_time
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.cases import mlp
from benchmarks.help import answer_help
from benchmarks.overhead import CALLS, RULES
from benchmarks.storing import RESULTS, store
from torchdeq import StopRule, solve
from torchdeq.solver import SOLVERS

FILE = RESULTS / "left.json"
ROUNDS, REPEATS = 7, 60
#: A residual that single precision does not reach: every check reads, and none ends the solve.
TOLERANCES = {"without a tolerance": 0.0, "with a tolerance": 1e-12}


def main() -> None:
    torch.set_num_threads(1)
    case = mlp(32, 64)
    rows = []
    for stop, tol in TOLERANCES.items():
        for name in RULES:
            row = {"solver": name, "stop": stop, **measure(case.f, case.z0, name, tol)}
            print(row, flush=True)
            rows.append(row)
    store(FILE, {"calls": CALLS, "rows": rows}, seeds=[0])


def measure(f: Callable[..., Any], z0: Tensor, name: str, tol: float) -> dict[str, Any]:
    """Return the microseconds of one evaluation, by part."""
    rule, rule_stop = SOLVERS[name](), StopRule(CALLS, tol, "rel")

    def run(g: Callable[..., Any] = f) -> int:
        return solve(g, z0, rule, rule_stop, on_failure="ignore").stats.nfe

    evaluations = run()
    whole, bare = [], []
    for _ in range(ROUNDS):
        whole.append(timed(run) / evaluations)
        bare.append(timed(lambda: plain(f, z0, evaluations)) / evaluations)
    profiles = [operators(run, f) for _ in range(ROUNDS)]
    times = {name: median(each[name][0] for each in profiles) for name in profiles[0]}
    inside, count = sum(times.values()), sum(each for _, each in profiles[0].values())
    total, alone = 1e6 * median(whole), 1e6 * median(bare)
    largest = sorted(times, key=lambda name: -times[name])[:3]
    return {
        "total": total,
        "f": alone,
        "operators": inside / evaluations,
        "count": count / evaluations,
        "largest": {name: times[name] / evaluations for name in largest},
        "python": total - alone - inside / evaluations,
        "evaluations": evaluations,
    }


@torch.no_grad()
def plain(f: Callable[..., Any], z: Tensor, calls: int) -> None:
    """Call f repeatedly."""
    for _ in range(calls):
        z = f(z)


def timed(run: Callable[[], object]) -> float:
    """Return the processor seconds of one run."""
    began = process_time()
    for _ in range(REPEATS):
        run()
    return (process_time() - began) / REPEATS


def operators(run: Callable[..., object], f: Callable[..., Any]) -> dict[str, tuple[float, int]]:
    """Return the microseconds in operators outside of f, and their number, by name."""

    def marked(z: Tensor) -> Any:
        with record_function("the map"):
            return f(z)

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run(marked)
    events = profiler.events()
    assert events is not None
    result: dict[str, tuple[float, int]] = {}
    for event in events:
        if event.cpu_parent is None and event.name.startswith("aten::"):
            time, count = result.get(event.name[6:], (0.0, 0))
            result[event.name[6:]] = time + event.cpu_time_total, count + 1
    return result


if __name__ == "__main__":
    answer_help(__doc__)
    main()
