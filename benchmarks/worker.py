"""A long-lived process that measures one contestant: JSON lines in, JSON lines out.

Started as `python -m benchmarks.worker MODULE [FOLDER]`; the folder comes first on its path.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import CASES, Case, State, apply, residual
from benchmarks.gauge import peak_bytes, seconds
from benchmarks.gradients import GradientBench
from benchmarks.metering import MeterBench

Reply = dict[str, Any]
load = cache(lambda name: CASES[name]())


class Bench(GradientBench, MeterBench):
    """The requests about a contestant: here solves, in the base classes gradients and counts."""

    def hello(self) -> Reply:
        """Return the names of the solvers, of those with a tolerance, and of linear solvers."""
        names = {"solvers": "NAMES", "stopping": "STOPPING", "linear": "LINEAR_NAMES"}
        return {key: getattr(self.contestant, name) for key, name in names.items()}

    def check(self, case: str, solver: str, calls: int, tol: float) -> Reply:
        """Count the calls of `f` in a solve; return its reported and its measured residual, too."""
        problem, count = load(case), 0

        def f(*z: State) -> State:
            nonlocal count
            count += 1
            return problem.f(*z)

        z, stats = self.contestant.solve(f, problem.z0, solver, calls, tol)
        return {
            "calls": count,
            "claimed": float(stats["rel_lowest"].max()),
            "residual": residual(problem, z),
        }

    def time(self, case: str, solver: str, calls: int, tol: float, least: float) -> Reply:
        """Return the seconds of one solve."""
        return {"seconds": seconds(self._solve(load(case), solver, calls, tol), least)}

    def compare(self, case: str, solver: str, calls: int, least: float) -> Reply:
        """Return the seconds of as many plain calls of `f`, and of a solve without a tolerance."""
        problem = load(case)
        bare = seconds(lambda: iterate(problem, calls), least)
        return {"bare": bare, **self.time(case, solver, calls, 0.0, least)}

    def read(self, case: str, solver: str, calls: int, least: float) -> Reply:
        """Return the seconds of a solve whose statistics are read."""
        problem = load(case)

        def run() -> None:
            self.contestant.solve(problem.f, problem.z0, solver, calls, 0.0)[1]["rel_lowest"]

        return {"seconds": seconds(run, least)}

    def peak(self, case: str, solver: str | None, calls: int) -> Reply:
        """Return the peak bytes of tensors in a solve, or in plain calls of `f`."""
        problem = load(case)
        if solver is None:
            return {"bytes": peak_bytes(lambda: iterate(problem, calls))}
        return {"bytes": peak_bytes(self._solve(problem, solver, calls, 0.0))}

    def _solve(self, case: Case, solver: str, calls: int, tol: float) -> Callable[[], object]:
        return lambda: self.contestant.solve(case.f, case.z0, solver, calls, tol)


def iterate(case: Case, calls: int) -> None:
    """Iterate with bare calls of f: the lower bound for the cost of any solver."""
    z = case.z0
    for _ in range(calls):
        z = apply(case.f, z)


def main(module: str, folder: str | None = None) -> None:
    """Answer requests until the input ends; an error is an answer, too."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a library may print
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    if folder is not None:
        sys.path.insert(0, folder)
        found = import_module("torchdeq").__file__
        if found is None or not Path(found).is_relative_to(folder):
            raise ImportError(f"torchdeq came from {found}, expected it in {folder}")
    bench = Bench(import_module(f"benchmarks.{module}"))
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = getattr(bench, request.pop("op"))(**request)
        except Exception as error:
            first_line = next(iter(str(error).splitlines()), "")
            reply = {"error": f"{type(error).__name__}: {first_line}"}
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
