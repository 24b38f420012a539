"""The typed entry point: solve a fixed point and make it differentiable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchdeq.grad.base import Backward, beside
from torchdeq.grad.closure import ExplicitFn, transforms_active
from torchdeq.grad.explicit import root
from torchdeq.grad.implicit import Implicit
from torchdeq.packing import PackedFn, Packing, State
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
    packing = Packing(z0)
    packed = packing.wrap(f, args)
    if transforms_active() or (isinstance(backward, Implicit) and backward.higher_order):
        if compact:
            raise ValueError(
                "compact=True cannot be combined with higher_order=True, torch.func transforms or "
                "forward mode: they need the whole batch again in the backward pass"
            )
        ask = _Ask(solver, stop, on_failure, keep_estimate)
        return _explicit(packed, packing.pack(z0).detach(), ask, backward)
    found = solve(f, z0, solver, stop, args=args, compact=compact, on_failure=on_failure)
    if keep_estimate and not torch.is_grad_enabled():
        return FixedPoint(found.z, [found.z], found.stats)
    # With nothing solved, the start keeps its graph: backpropagation through time reaches it.
    z = packing.pack(found.z if stop.max_iter else z0)
    states = backward.attach(packed, z)
    if keep_estimate:
        states = [beside(packing.split(z.detach()), states[-1])]
    shaped = [packing.rebuild(tensors) for tensors in states]
    return FixedPoint(shaped[-1], shaped, found.stats)


class _Ask(NamedTuple):
    """What is asked of the forward solve on the explicit path."""

    solver: Solver[Any]
    stop: StopRule
    on_failure: str
    keep_estimate: bool


def _explicit(packed: PackedFn, z0: Tensor, ask: _Ask, backward: Backward) -> FixedPoint:
    """The path on which everything that ``f`` uses is an input."""
    packing = packed.packing
    F = _Equilibrium(packed, z0, ask, backward)
    z = root(F, z0, *F.explicit.inputs)
    if isinstance(backward, Implicit):
        states = [packing.split(z)]
    else:
        states = backward.attach(packed, z.detach())
        if ask.keep_estimate:
            states = [beside(packing.split(z.detach()), states[-1])]
    shaped = [packing.rebuild(tensors) for tensors in states]
    return FixedPoint(shaped[-1], shaped, F.stats)


class _Equilibrium:
    """The operator of a fixed point: ``f`` with explicit inputs, and both solves."""

    def __init__(self, packed: PackedFn, z0: Tensor, ask: _Ask, backward: Backward) -> None:
        self.explicit, self.ask = ExplicitFn(packed, z0), ask
        self.implicit = isinstance(backward, Implicit)
        self.method = backward if isinstance(backward, Implicit) else Implicit()
        self.stats = SolverStat()

    def make(self, *c: Tensor) -> Callable[[Tensor], Tensor]:
        return self.explicit.make(*c)

    def __call__(self, z: Tensor, *c: Tensor) -> Tensor:
        return self.explicit(z, *c)

    def solve(self, f: Callable[[Tensor], Tensor], z0: Tensor) -> Tensor:
        """The forward solve; ``z0`` may have lost a dimension to ``vmap`` or won one."""
        ask, rows = self.ask, z0.reshape(prod(z0.shape[:-1]), z0.shape[-1])

        def on_rows(z: Tensor) -> Tensor:
            return f(z.view(z0.shape)).reshape(rows.shape)

        found = solve(on_rows, rows, ask.solver, ask.stop, on_failure=ask.on_failure)
        self.stats = found.stats
        z: Tensor = found.z.view(z0.shape)
        if self.implicit and not ask.keep_estimate:
            return self.explicit.last_call(f, z)
        self.explicit.only_repeat(torch.get_rng_state())
        return z

    def solve_affine(self, f: Callable[[Tensor], Tensor], g: Tensor) -> Tensor:
        """``u = A u + g`` where ``f(u) = A u + g``: an adjoint or a tangent system."""
        rows = g.reshape(prod(g.shape[:-1]), g.shape[-1])

        def product(u: Tensor) -> Tensor:
            return f(u.view(g.shape)).reshape(rows.shape) - rows

        return self.method.solve_adjoint(product, rows).view(g.shape)
