"""The library as a contestant: every registered solver, with its default options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from benchmarks.cases import State
from benchmarks.probe import Ask
from torchdeq import fixed_point, mem_gc
from torchdeq.experimental import Reversible
from torchdeq.grad import Backward, Implicit, Phantom
from torchdeq.linear import GMRES, LINEAR, LinearSolver
from torchdeq.solver import SOLVERS, Anderson, Broyden, FixedPointIter, Solver, SolverStat, StopRule
from torchdeq.solver import solve as solve_fixed_point

NAMES = list(SOLVERS)
STOPPING = [name for name in NAMES if SOLVERS[name].watches]  # those that take a tolerance
LINEAR_NAMES = list(LINEAR)
Map = Callable[..., State]


def solve(f: Map, z0: State, solver: str, calls: int, tol: float) -> tuple[State, SolverStat]:
    """Solve within `calls` evaluations, or until the relative residual is `tol`."""
    stop = StopRule(max_iter=calls, tol=tol, mode="rel")
    solution = solve_fixed_point(f, z0, SOLVERS[solver](), stop, on_failure="ignore")
    return solution.z, solution.stats


def metered_solve(f: Map, z0: State, solver: str, calls: int, tol: float, every: int) -> None:
    """Solve for the meter, with a check every so many evaluations."""
    stop = StopRule(calls, tol, "rel", check_every=every)
    bare = isinstance(z0, Tensor)  # the map brings its own derivative for one tensor only
    rule = SOLVERS[solver](**({} if bare else SOLVERS[solver].options_without_jvp))
    solve_fixed_point(f, z0, rule, stop, on_failure="ignore")


def metered_linear(
    matvec: Callable[[Tensor], Tensor],
    b: Tensor,
    solver: str,
    products: int,
    tol: float,
    every: int,
) -> None:
    """Solve linear systems for the meter."""
    LINEAR[solver]().solve(matvec, b, StopRule(products, tol, "rel", check_every=every))


ADJOINTS: dict[str, Solver[Any] | LinearSolver] = {
    **{name: SOLVERS[name]() for name in STOPPING},
    "anderson m=5": Anderson(m=5),
    "anderson m=10": Anderson(m=10),
    "broyden 10": Broyden(l_thres=10),
    **{name: LINEAR[name]() for name in LINEAR},
    "gmres full": GMRES(restart=400),
    "shine": Broyden(l_thres=None),  # both solves are Broyden's
}


def differentiable(f: Map, z0: State, ask: Ask) -> State:
    """Return the fixed point with an implicit gradient."""
    backward = Implicit(
        solver=ADJOINTS[ask.adjoint],
        stop=StopRule(ask.products, ask.adjoint_tol),
        on_failure="ignore",
        init="shine" if ask.adjoint == "shine" else "zeros",
    )
    solver, stop = ADJOINTS[ask.solver], StopRule(ask.calls, ask.tol, "rel")
    assert isinstance(solver, Solver)
    return fixed_point(f, z0, solver=solver, stop=stop, backward=backward, on_failure="ignore").z


def phantom(f: Map, z0: State, steps: int) -> State:
    """Take steps with a graph from `z0`."""
    return fixed_point(f, z0, stop=StopRule(0), backward=Phantom(grad=steps)).z


def _after(calls: int, backward: Backward) -> Callable[[Map, State], State]:
    """Iterate until the budget is spent, then attach a backward."""
    stop = StopRule(calls, 0.0)
    solver = None if isinstance(backward, Reversible) else FixedPointIter()
    return lambda f, z0: fixed_point(f, z0, solver=solver, stop=stop, backward=backward).z


METHODS: dict[str, Callable[[Map, State], State]] = {
    "implicit, 20 calls": _after(20, Implicit(stop=StopRule(20, 1e-6), on_failure="ignore")),
    "phantom 5, 20 calls": _after(20, Phantom(grad=5)),
    "unrolled 20": lambda f, z0: phantom(f, z0, 20),
    "unrolled 20, mem_gc": lambda f, z0: phantom(lambda z: mem_gc(f, (z,)), z0, 20),
    "reversible 20": _after(20, Reversible()),
    "unrolled 12": lambda f, z0: phantom(f, z0, 12),
    "reversible 12": _after(12, Reversible()),
}
