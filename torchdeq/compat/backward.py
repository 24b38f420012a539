"""A backward pass as a function: `backward_factory` of torchdeq 0.1.0."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from torchdeq.compat.functions import SolverFunction, function_solver, published_options
from torchdeq.compat.ignored import ignore_keywords
from torchdeq.config import DEQConfig
from torchdeq.grad import Backward, Implicit, Phantom, Writer, make_adjoint_solver
from torchdeq.packed import PackedFn
from torchdeq.packing import Packing
from torchdeq.solver import SOLVERS
from torchdeq.stopping import StopRule


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
    """Return a backward pass as a function, as torchdeq 0.1.0 did.

    The function `backward(trainer, func, z, writer=None)` returns differentiable states that start
    from the solved `z`, and ignores `trainer`.

    Args:
        grad_type: `"ift"`, or the steps of a phantom gradient.
        hook_ift: no effect: implicit differentiation needs no hook here.
        b_solver: name or function of the backward solver; plain iteration if None.
        b_solver_kwargs: `max_iter`, `tol`, `stop_mode` and options of that solver.
        sup_gap: see `Phantom`.
        sup_loc: see `Phantom`.
        tau: see `Phantom`.
        **published: further options of a DEQ, which have no effect here, as in 0.1.0.
    """
    ignore_keywords(published, "backward_factory", DEQConfig.names(), _PARAMETERS)
    make: Callable[[Writer | None], Backward]
    if grad_type == "ift":
        make = _implicit(b_solver, dict(b_solver_kwargs or {}))
    elif isinstance(grad_type, int):
        phantom = Phantom(grad=grad_type, tau=tau, sup_gap=sup_gap, sup_loc=tuple(sup_loc or ()))

        def make(writer: Writer | None) -> Backward:
            return phantom
    else:
        raise ValueError(f"grad_type must be 'ift' or a number of steps, got {grad_type!r}")

    def attach(
        trainer: object,
        func: Callable[[Tensor], Tensor],
        z_pred: Tensor,
        writer: Writer | None = None,
    ) -> list[Tensor]:
        packing = Packing(z_pred)
        states = make(writer).attach(PackedFn(packing, func), packing.pack(z_pred))
        return [tensor for (tensor,) in states]

    return attach


def _implicit(
    b_solver: str | SolverFunction | None, options: dict[str, Any]
) -> Callable[[Writer | None], Backward]:
    """Return a function that builds implicit differentiation with a writer."""
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
    return lambda writer: Implicit(solver=solver, stop=stop, writer=writer)


_PARAMETERS = [
    name for name in inspect.signature(backward_factory).parameters if name != "published"
]
