"""Backward passes built from names and options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torchdeq.config import DEQConfig
from torchdeq.grad.base import BACKWARDS, Backward
from torchdeq.grad.implicit import Implicit
from torchdeq.grad.phantom import Phantom
from torchdeq.linear import LINEAR, LinearSolver
from torchdeq.registry import UnknownName, build, suggest
from torchdeq.solver import SOLVERS, Solver, make_solver
from torchdeq.stats import SolverStat

Writer = Callable[[SolverStat], object]


def make_adjoint_solver(name: str, options: Mapping[str, Any]) -> Solver[Any] | LinearSolver:
    """Return a solver for the backward pass by its name: a fixed-point solver or a linear one."""
    if name in LINEAR:
        return build(LINEAR[name], f"linear solver {name!r}", options)
    if name not in SOLVERS:
        raise UnknownName(f"unknown backward solver {name!r}{suggest(name, [*SOLVERS, *LINEAR])}")
    return make_solver(name, options)


def make_backwards(config: DEQConfig, n: int, writer: Writer | None = None) -> list[Backward]:
    """Return a backward for each of `n` states: for the last the chosen one, otherwise phantom.

    Args:
        config: the options; `grad` is one number of steps, or one per state.
        n: the number of states. If `grad` has more numbers, the last `n` of them count.
        writer: called with the statistics of an implicit backward solve.
    """
    steps = config.grad * n if len(config.grad) == 1 else config.grad
    if len(steps) < n:
        raise ValueError(
            f"grad takes one number, or one for each of the {n} states, got {config.grad}"
        )
    beyond = [k for k in config.sup_loc if k > max(steps)]
    if beyond:
        raise ValueError(f"sup_loc must lie within the {max(steps)} steps of grad, got {beyond}")
    backwards: list[Backward] = [
        Phantom(
            grad=k,
            tau=config.tau,
            sup_gap=config.sup_gap,
            sup_loc=tuple(i for i in config.sup_loc if i <= k),
        )
        for k in steps[-n:]
    ]
    backwards[-1] = _last_backward(config, steps[-1], backwards[-1], writer)
    return backwards


def _last_backward(
    config: DEQConfig, steps: int, phantom: Backward, writer: Writer | None
) -> Backward:
    """Return the backward of the last state, which the options choose."""
    if config.implicit:
        return Implicit(
            solver=make_adjoint_solver(config.b_solver, config.b_solver_kwargs),
            stop=config.b_stop,
            higher_order=config.higher_order,
            writer=writer,
            on_failure=config.on_failure,
            init=config.b_init,  # type: ignore[arg-type]
        )
    if config.backward in ("auto", "phantom"):
        return phantom
    return BACKWARDS[config.backward].from_options({**vars(config), "grad": steps})
