"""torchdeq 0.1.0 as a contestant; only a worker that has it first on its path imports this."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch

from benchmarks.cases import State
from benchmarks.probe import Ask

# By name, because in every other process these modules are the library's own.
_get_solver = import_module("torchdeq.solver").get_solver
_get_deq = import_module("torchdeq").get_deq
_wrap = import_module("torchdeq.utils.layer_utils").deq_decorator

NAMES = ["fixed_point_iter", "simple_fixed_point_iter", "anderson", "broyden"]
STOPPING = [name for name in NAMES if name != "simple_fixed_point_iter"]
ADJOINTS = STOPPING
LINEAR_NAMES: list[str] = []


@torch.no_grad()
def solve(
    f: Callable[..., State], z0: State, solver: str, calls: int, tol: float
) -> tuple[State, dict[str, Any]]:
    """Solve within `calls` evaluations, or until the relative residual is `tol`."""
    func, z = _wrap(f, z0, no_stat=False)  # a tuple state is packed into vectors
    max_iter = _max_iter(solver, calls)
    z, _, stats = _get_solver(solver)(func, z, max_iter=max_iter, tol=tol, stop_mode="rel")
    return (tuple(func.vec2list(z)) if isinstance(z0, tuple) else z), stats


def metered_solve(
    f: Callable[..., State], z0: State, solver: str, calls: int, tol: float, every: int
) -> None:
    """Solve for the meter; every iteration is a check."""
    solve(f, z0, solver, calls, tol)


def differentiable(f: Callable[..., State], z0: State, ask: Ask) -> State:
    """Return the fixed point with an implicit gradient."""
    return _layer(ask)(f, z0)[0][-1]


@cache
def _layer(ask: Ask) -> Any:
    return _get_deq(
        ift=True,
        f_solver=ask.solver,
        f_max_iter=_max_iter(ask.solver, ask.calls),
        f_tol=ask.tol,
        f_stop_mode="rel",
        b_solver=ask.adjoint,
        b_max_iter=_max_iter(ask.adjoint, ask.products),
        b_tol=ask.adjoint_tol * ask.size,  # absolute, on a cotangent as it comes
        b_stop_mode="abs",
    )


def _max_iter(solver: str, calls: int) -> int:
    return calls - 1 if solver == "broyden" else calls  # its first evaluation is not counted
