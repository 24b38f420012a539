"""Backward passes from names and options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from torch import Tensor

from torchdeq.compat.ignored import ignore_keywords
from torchdeq.config import DEQConfig
from torchdeq.grad.base import BACKWARDS, Backward
from torchdeq.grad.implicit import Implicit
from torchdeq.grad.phantom import Phantom
from torchdeq.grad.reversible import Reversible
from torchdeq.linear import LINEAR, LinearSolver
from torchdeq.packing import Packing
from torchdeq.registry import UnknownName, build, suggest
from torchdeq.solver import SOLVERS, Solver, SolverStat, StopRule, make_solver, published_options
from torchdeq.solver.functions import SolverFunction, function_solver

Writer = Callable[[SolverStat], object]


def make_adjoint_solver(name: str, options: Mapping[str, Any]) -> Solver[Any] | LinearSolver:
    """A solver for the backward pass: any fixed-point solver, or a linear one."""
    if name in LINEAR:
        return build(LINEAR[name], f"linear solver {name!r}", options)
    if name not in SOLVERS:
        raise UnknownName(f"unknown backward solver {name!r}{suggest(name, [*SOLVERS, *LINEAR])}")
    return make_solver(name, options)


def make_backwards(config: DEQConfig, n: int, writer: Writer | None = None) -> list[Backward]:
    """One backward for each of ``n`` states: the chosen one for the last, phantom for the others.

    Args:
        config: the options; ``grad`` holds one number of steps, or one per state.
        n: states. If there are fewer than numbers in ``grad``, the last numbers count.
        writer: receives the statistics of an implicit backward solve.
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
    backwards[-1] = _last(config, steps[-1], backwards[-1], writer)
    return backwards


def _last(config: DEQConfig, steps: int, phantom: Backward, writer: Writer | None) -> Backward:
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
    if config.backward == "reversible":
        # 1, the default of the option, cannot be reversed.
        return Reversible() if config.tau == 1 else Reversible(tau=config.tau)
    kind = BACKWARDS[config.backward]
    known = {**vars(config), "grad": steps}
    return kind(**{f.name: known[f.name] for f in fields(kind) if f.name in known})  # type: ignore[arg-type]


def backward_factory(
    grad_type: str | int = "ift",
    hook_ift: bool = False,
    b_solver: str | SolverFunction | None = None,
    b_solver_kwargs: Mapping[str, Any] | None = None,
    sup_gap: int = -1,
    sup_loc: Sequence[int] | None = None,
    tau: float = 1.0,
    **published: Any,
) -> Callable[..., list[Tensor]]:
    """A backward as a function, the interface of torchdeq 0.1.0.

    The result is called as ``backward(trainer, func, z, writer=None)`` and returns the
    differentiable states that grow from the solved ``z``; ``trainer`` is not used.

    Args:
        grad_type: ``"ift"``, or the steps of a phantom gradient.
        hook_ift: no longer makes a difference.
        b_solver: name or function of the backward solver; plain iteration if None.
        b_solver_kwargs: ``max_iter``, ``tol``, ``stop_mode`` and options of that solver.
        sup_gap: see :class:`Phantom`.
        sup_loc: see :class:`Phantom`.
        tau: see :class:`Phantom`.
        **published: further options of a DEQ, which have no effect here, as in 0.1.0.
    """
    ignore_keywords(published, "backward_factory", DEQConfig.names(), _FACTORY)
    backward: Callable[[Writer | None], Backward]
    if grad_type == "ift":
        options = dict(b_solver_kwargs or {})
        stop = StopRule(
            options.pop("max_iter", 40),
            options.pop("tol", 1e-6),
            options.pop("stop_mode", "abs"),
            return_final=options.pop("return_final", False),
        )
        if b_solver is None or isinstance(b_solver, str):
            name = b_solver or "fixed_point_iter"
            options = published_options(name, options) if name in SOLVERS else options
            solver = make_adjoint_solver(name, options)
        else:
            solver = function_solver(b_solver, options)
        backward = lambda writer: Implicit(solver=solver, stop=stop, writer=writer)  # noqa: E731
    elif isinstance(grad_type, int):
        phantom = Phantom(grad=grad_type, tau=tau, sup_gap=sup_gap, sup_loc=tuple(sup_loc or ()))
        backward = lambda writer: phantom  # noqa: E731
    else:
        raise ValueError(f"grad_type is 'ift' or a number of steps, got {grad_type!r}")

    def attach(
        trainer: object,
        func: Callable[[Tensor], Tensor],
        z_pred: Tensor,
        writer: Writer | None = None,
    ) -> list[Tensor]:
        packing = Packing(z_pred)
        states = backward(writer).attach(packing.wrap(func), packing.pack(z_pred))
        return [tensor for (tensor,) in states]

    return attach


_FACTORY = [name for name in inspect.signature(backward_factory).parameters if name != "published"]
