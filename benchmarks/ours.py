"""The library as a contestant: every registered solver, with its default options."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.cases import State
from torchdeq.solver import SOLVERS, SolverStat, StopRule
from torchdeq.solver import solve as solve_fixed_point

NAMES = list(SOLVERS)
STOPPING = [name for name in NAMES if SOLVERS[name].watches]  # those that take a tolerance


def solve(
    f: Callable[..., State], z0: State, solver: str, calls: int, tol: float
) -> tuple[State, SolverStat]:
    """Solve within ``calls`` evaluations, or until the relative residual is ``tol``."""
    stop = StopRule(max_iter=calls, tol=tol, mode="rel")
    solution = solve_fixed_point(f, z0, SOLVERS[solver](), stop, on_failure="ignore")
    return solution.z, solution.stats
