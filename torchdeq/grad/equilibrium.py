"""Fixed points as operators with explicit inputs, for exact derivatives of every order.

`grad/explicit.py` differentiates any operator. This file defines two: an equilibrium that is
solved already, and one that a solve inside a function transform computes.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
from torch import Tensor

from torchdeq._torch import function_transforms_active, is_legacy_batched
from torchdeq.grad.adjoint import solve_adjoint, solve_batched_cotangents
from torchdeq.grad.base import Backward
from torchdeq.grad.capture import Capture, LateInputs, TransformedFn, capture
from torchdeq.grad.explicit import Map, root
from torchdeq.grad.implicit import Implicit, coupling_of
from torchdeq.grad.watching import Inputs
from torchdeq.modules import ModuleState
from torchdeq.packed import PackedFn
from torchdeq.randomness import Randomness
from torchdeq.solution import FixedPoint
from torchdeq.stats import SolverStat

RowSolve = Callable[[Map, Tensor], FixedPoint[Tensor]]


def attach_exactly(method: Implicit, f: PackedFn, z: Tensor) -> list[Tensor]:
    """Return the tensors of a solved state whose gradient can be differentiated again."""
    z = z.detach()
    fz, record = capture(f, z)
    if not any(t.requires_grad for t in record.inputs):
        with torch.enable_grad():  # raises if f has inputs that `capture` could not see
            record.replay(*record.inputs)(z.clone().requires_grad_())
        return f.packing.split(fz)
    z = root(_SolvedEquilibrium(record, method, fz, z), z, *record.inputs)
    return f.packing.split(z.clone())  # the caller may write into it


def solve_with_all_inputs(
    f: PackedFn,
    start: Tensor,
    solve: RowSolve,
    backward: Backward,
    inputs: Inputs,
    keep_estimate: bool,
) -> tuple[Tensor, SolverStat, Inputs]:
    """Solve inside a function transform; every tensor that `f` uses becomes an explicit input.

    If a call of `f` uses a tensor that no earlier call has used, the solve starts again with that
    tensor as an input.

    Args:
        f: the packed map.
        start: the first iterate, (B, D).
        solve: solves for the fixed point of a map of rows.
        backward: implicit differentiation, or a method that attaches its own graph afterwards.
        inputs: the inputs that earlier calls of `f` have used.
        keep_estimate: return the solver's estimate instead of its image.

    Returns:
        The solved state, the statistics of the solve, and all inputs of `f`.
    """
    while True:
        F = _TransformedEquilibrium(f, solve, backward, inputs, keep_estimate)
        tensors = list(inputs.values())
        if not F.implicit:
            tensors = [t.detach() for t in tensors]
        try:
            return root(F, start, *tensors), F.stats, inputs
        except LateInputs as late:
            inputs = inputs | late.inputs


class _ImplicitOperator:
    """An operator whose adjoint and tangent systems an `Implicit` method solves."""

    def __init__(self, f: PackedFn, method: Implicit) -> None:
        self.f, self.method = f, method
        self.functional = function_transforms_active()

    def solve_affine(self, product: Map, g: Tensor) -> Tensor:
        """Return `u` with `u = A u + g`, by products `A u`; `vmap` may have added dimensions."""
        if is_legacy_batched(g):
            return solve_batched_cotangents(self.solve_affine, product, g)
        batches = g.reshape(prod(g.shape[:-2]), *g.shape[-2:])  # (N, B, D)
        u = solve_adjoint(
            self.method, lambda u: product(u.view(g.shape)).view(batches.shape), batches,
            coupling_of(self.f), self.f.eps, self.f.peers,
        )  # fmt: skip
        return u.view(g.shape)


class _SolvedEquilibrium(_ImplicitOperator):
    """The operator of an equilibrium that is solved already, with the record of a call there."""

    def __init__(self, record: Capture, method: Implicit, fz: Tensor, z: Tensor) -> None:
        super().__init__(record.f, method)
        self.map_to_solve = self.map_to_differentiate = record.replay
        self._solution = (fz, z)

    def solve(self, f: Map, z0: Tensor) -> tuple[Tensor, ...]:
        return self._solution


class _TransformedEquilibrium(_ImplicitOperator):
    """The operator of an equilibrium inside a function transform; `solve` computes the state."""

    record: Capture  # the record of the call at the solved state, which `solve` makes

    def __init__(
        self, f: PackedFn, solve: RowSolve, backward: Backward, inputs: Inputs, keep_estimate: bool
    ) -> None:
        self.implicit = isinstance(backward, Implicit)
        super().__init__(f, backward if isinstance(backward, Implicit) else Implicit())
        self.inputs, self.keep_estimate, self.stats = inputs, keep_estimate, SolverStat()
        self._solve = solve
        self._used: frozenset[int] = frozenset()

    def map_to_differentiate(self, *c: Tensor) -> Map:
        return self.record.replay(*c)

    def map_to_solve(self, *c: Tensor) -> Map:
        f = TransformedFn(self.f, self.inputs, c)

        def call(z: Tensor) -> Tensor:
            fz = f(z)
            self._used = f.used
            return fz

        return call

    def solve(self, f: Map, z0: Tensor) -> tuple[Tensor, ...]:
        """Solve from `z0`; `vmap` may have removed a dimension or added one."""
        rows = z0.reshape(prod(z0.shape[:-1]), z0.shape[-1])
        if self.f.coupled is True:
            rows = z0.reshape(prod(z0.shape[:-2]), z0.shape[-2] * z0.shape[-1])

        def on_rows(z: Tensor) -> Tensor:
            return f(z.view(z0.shape)).reshape(rows.shape)

        solution = self._solve(on_rows, rows)
        self.stats = solution.stats
        z = solution.z.view(z0.shape)
        if not self.implicit:
            return (z,)
        before = Randomness(z.device)
        fz = f(z)
        randomness = before if before.advanced else None
        self.record = Capture(self.f, self.inputs, self._used, ModuleState(self.f.f), randomness)
        return (z,) if self.keep_estimate else (fz, z)
