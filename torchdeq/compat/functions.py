"""Solvers as functions: `get_solver` and `register_solver` as torchdeq 0.1.0 had them.

In 0.1.0 a solver is a function `(func, x0, max_iter, tol, stop_mode, indexing, **options)` that
returns `(z, states, info)`. `get_solver` returns a solver of this library as such a function, and
`register_solver` makes a solver of this library from such a function of a program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from torchdeq.compat.ignored import without_ignored
from torchdeq.pytree import State
from torchdeq.registry import check_class
from torchdeq.solver import SOLVERS, Loop, Outcome, Problem, Solver, make_solver, solve
from torchdeq.solver.base import FixedPointFn
from torchdeq.stats import SolverStat
from torchdeq.stopping import Status, StopRule
from torchdeq.trace import Trace

#: `(func, x0, max_iter, tol, stop_mode, indexing, **options) -> (z, states, info)`
SolverFunction = Callable[..., tuple[Any, list[Any], Mapping[str, Tensor]]]


def get_solver(key: str) -> SolverFunction:
    """Return the solver registered under `key` as a function.

    A function that a program registered is returned as it is. The function of any other solver has
    the parameters `(func, x0, max_iter=50, tol=1e-3, stop_mode="abs", indexing=None, **options)`
    and returns the fixed point, the states after the evaluations in `indexing`, and the statistics.
    """
    kind = SOLVERS[key]
    return kind.function if issubclass(kind, FunctionSolver) else _as_function(key)


def register_solver(solver_type: str, solver: type[Solver[Any]] | SolverFunction) -> None:
    """Register a solver under a name: a `Solver` class, or a function in the interface of 0.1.0.

    The library calls a function as `solver(func, x0=, max_iter=, tol=, stop_mode=)`, with
    `indexing=` too where states are to be recorded, and expects `(z, states, info)`. A single
    tensor comes in its own shape, a state of several tensors packed as one (B, D) matrix.
    """
    if callable(solver) and not isinstance(solver, type):
        SOLVERS.register(solver_type, _as_class(str(solver_type), solver))
        return
    steps = all(getattr(solver, n, None) is not getattr(Solver, n) for n in ("init", "step"))
    runs = getattr(solver, "run", None) is not Solver.run
    what = "a solver, unless it is a function returning (z, states, info),"
    check_class(solver, Solver, what, "init and step, or run", steps or runs)
    SOLVERS.register(solver_type, solver)


def published_options(key: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a program without those that 0.1.0 ignored for this solver.

    A note names each option that is left out.
    """
    kind = SOLVERS[key]
    if issubclass(kind, FunctionSolver):
        return dict(options)
    fields = getattr(kind, "__dataclass_fields__", {})
    return without_ignored(options, [*fields, *kind.aliases], key)


def function_solver(function: SolverFunction, options: Mapping[str, Any]) -> Solver[Any]:
    """Return a solver from a function of a program, or from one that `get_solver` returned."""
    key = next((key for key in SOLVERS if get_solver(key) is function), None)
    if key is not None:
        return make_solver(key, published_options(key, options))
    return _as_class(getattr(function, "__name__", "function"), function)(**options)


def solver_stat_from_final_step(z: Any, fz: Any, nstep: int = 0) -> SolverStat:
    """Return statistics of the last pair `z, f(z)`, for the solver function of a program."""
    return SolverStat.from_final_step(z, fz, nstep=nstep)


def _as_class(name: str, function: SolverFunction) -> type[FunctionSolver]:
    """Return a solver class that calls a function."""
    members = {"function": staticmethod(function), "__doc__": function.__doc__}
    return type(name, (FunctionSolver,), members)


@cache
def _as_function(key: str) -> SolverFunction:
    """Return the function of a solver, the same object at every call."""
    return _NamedSolver(key)


class _NamedSolver:
    """A registered solver class in the interface of 0.1.0; a pickle stores its name only."""

    def __init__(self, key: str) -> None:
        self.key = self.__name__ = key
        self.__doc__ = f"The solver {key!r} in the interface of torchdeq 0.1.0; see `get_solver`."

    def __call__(
        self,
        func: Callable[..., State],
        x0: State,
        max_iter: int = 50,
        tol: float | None = 1e-3,
        stop_mode: str = "abs",
        indexing: Sequence[int] | None = None,
        *,
        return_final: bool = False,
        on_failure: str = "auto",
        **options: Any,
    ) -> tuple[State, list[State], SolverStat]:
        stop = StopRule(max_iter, tol, stop_mode, return_final=return_final)
        rule = make_solver(self.key, published_options(self.key, options))
        solution = solve(func, x0, rule, stop, indexing or (), on_failure=on_failure)
        return solution.z, solution.states, solution.stats

    def __reduce__(self) -> tuple[Callable[[str], SolverFunction], tuple[str]]:
        return get_solver, (self.key,)

    def __repr__(self) -> str:
        return f"<solver {self.key}>"


class FunctionSolver(Solver[None]):
    """A solver that a program registered as a function in the interface of 0.1.0."""

    function: ClassVar[SolverFunction]
    chains: ClassVar[bool] = False

    def __init__(self, **options: Any) -> None:
        self.options = options

    @classmethod
    def from_options(cls, name: str, options: Mapping[str, Any]) -> Self:
        return cls(**options)  # the function itself checks them

    def run(self, problem: Problem, loop: Loop) -> Outcome:
        f, stop, packing = problem.f, problem.stop, problem.f.packed.packing
        if stop.rtol is not None:
            raise ValueError(
                "a solver function takes tol and stop_mode only, got rtol and atol: use tol, or a "
                "Solver class"
            )
        if f.packed.peers.synchronised:
            raise ValueError(
                "a solver function decides by itself when to stop, so sync_stop has no effect on "
                "it: use a Solver class"
            )
        single = len(packing.leaves) == 1
        to_rows = packing.leaves[0].to_rows if single else lambda t: t
        calls = _CountedMap(f, single)
        x0 = packing.leaves[0].from_rows(problem.z0) if single else problem.z0
        indexing = {"indexing": list(problem.record)} if problem.record else {}
        z, states, info = self.function(
            calls, x0=x0, max_iter=stop.max_iter, tol=stop.tol or 0.0, stop_mode=stop.mode,
            **indexing, **self.options,
        )  # fmt: skip
        z = to_rows(z)
        rows = [to_rows(state) for state in states][: len(problem.record)]
        rows += [z] * (len(problem.record) - len(rows))
        stats = SolverStat(info, nfe=calls.nfe)
        trace = Trace(z.new_empty(0, len(z)), z.new_empty(0, len(z)), [])
        return Outcome(z, rows, trace, calls.nfe, _with_status(stats, stop, len(z)))


class _CountedMap:
    """The map that a solver function calls: it counts calls, but does not enforce the budget."""

    def __init__(self, f: FixedPointFn, single: bool) -> None:
        self.f, self.single, self.nfe = f, single, 0

    def __call__(self, z: Tensor, tau: float = 1.0) -> Tensor:
        self.nfe += 1
        fz = self.f.packed.on_tensors([z])[0] if self.single else self.f.packed(z)
        return fz if tau == 1 else torch.lerp(z, fz, tau)


def _with_status(stats: SolverStat, stop: StopRule, batch: int) -> SolverStat:
    """Return the statistics with a status that follows from the residuals of the function.

    If the function does not report one residual per sample, the status is MAX_ITER.
    """
    lowest = stats["rel_lowest" if stop.mode == "rel" else "abs_lowest"]
    if lowest.shape == (batch,):
        met = (lowest >= 0) & (lowest <= stop.goal)
        status = torch.where(met, int(Status.CONVERGED), int(Status.MAX_ITER))
        status = torch.where(lowest.isfinite(), status, int(Status.NONFINITE))
        return SolverStat(dict(stats), nfe=stats.nfe, status=status.to(torch.int8))
    unknown = torch.full((batch,), int(Status.MAX_ITER), dtype=torch.int8)
    return SolverStat(dict(stats), nfe=stats.nfe, status=unknown)
