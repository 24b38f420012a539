"""The typed entry point: solve a fixed point and make it differentiable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from torchdeq.grad.base import Backward, beside
from torchdeq.grad.implicit import Implicit
from torchdeq.packing import Packing, State
from torchdeq.solver import Anderson, Solver, SolverStat, StopRule, solve


@dataclass(frozen=True)
class FixedPoint:
    """A differentiable fixed point.

    Args:
        z: the state, in the structure of the start.
        states: the states that the backward pass returns, the last of them ``z``.
        stats: how the forward solve went.
    """

    z: State
    states: list[State]
    stats: SolverStat


def fixed_point(
    f: Callable[..., State],
    z0: State,
    args: tuple[Any, ...] = (),
    *,
    solver: Solver[Any] | None = None,
    backward: Backward | None = None,
    stop: StopRule | None = None,
    compact: bool = False,
    on_failure: str = "warn",
    keep_estimate: bool = False,
) -> FixedPoint:
    r"""Solve :math:`z^\star = f(z^\star)` and attach the gradient of :math:`z^\star`.

    Gradients reach the parameters of modules in ``f``, tensors it closes over and ``args``. Whether
    there is a graph follows the grad mode.

    Args:
        f: called as ``f(z, *args)``, or ``f(*z, *args)`` for a tuple or list state.
        z0: the start. It receives no gradient, except for a budget of 0.
        args: further arguments of ``f``.
        solver: Anderson acceleration if None.
        backward: implicit differentiation by GMRES if None.
        stop: budget and tolerance of the forward solve.
        compact: finished samples leave the batch; every tensor in ``args`` must lead with it.
        on_failure: what to do about samples that did not converge: ignore, warn or raise.
        keep_estimate: return the solver's own estimate, bit for bit, with the gradient of what the
            backward pass attaches beside it; False returns the attached state itself.
    """
    solver, backward = solver or Anderson(), backward or Implicit()
    stop = StopRule() if stop is None else stop
    found = solve(f, z0, solver, stop, args=args, compact=compact, on_failure=on_failure)
    if keep_estimate and not torch.is_grad_enabled():
        return FixedPoint(found.z, [found.z], found.stats)
    packing = Packing(z0)
    # With nothing solved, the start keeps its graph: backpropagation through time reaches it.
    z = packing.pack(found.z if stop.max_iter else z0)
    states = backward.attach(packing.wrap(f, args), z)
    if keep_estimate:
        states = [beside(packing.split(z.detach()), states[-1])]
    shaped = [packing.rebuild(tensors) for tensors in states]
    return FixedPoint(shaped[-1], shaped, found.stats)
