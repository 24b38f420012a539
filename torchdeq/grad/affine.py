r"""Systems $u = J^\top u + b$, solved by any solver, linear or not, on the rest of a budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from torchdeq.distributed.peers import ALONE, Peers
from torchdeq.grad.shine import Shine
from torchdeq.linear import LinearSolution, LinearSolver
from torchdeq.packed import PackedFn
from torchdeq.packing import Packing
from torchdeq.solver import Solver
from torchdeq.solver.loop import solve_packed
from torchdeq.stopping import StopRule

Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class AffineSystem:
    """Systems with one Jacobian, and the solver with its budget.

    Args:
        solver: a fixed-point method or a linear solver.
        stop: budget and tolerance, of which earlier products may have spent a part.
        product: products with the transposed Jacobian, on the shape of the right-hand sides.
        eps: the precision in which `f` computes.
        peers: the processes that evaluate `f` together, and so make the same products.
    """

    solver: Solver[Any] | LinearSolver
    stop: StopRule
    product: Product
    eps: float
    peers: Peers = ALONE

    def run(
        self,
        b: Tensor,
        scale: Tensor | None = None,
        first: Tensor | None = None,
        spent: int = 0,
        shared: bool = False,
        spans: bool = False,
    ) -> LinearSolution:
        """Run the solver on the rest of the budget.

        Args:
            b: right-hand sides.
            scale: (rows,) divisors of the residuals; None if `b` has norm 1.
            first: the product with `b`, if it is one of those `spent`.
            spent: the number of products so far.
            shared: whether a fixed-point method returns the same iterate for all samples.
            spans: whether rows continue in other processes.
        """
        # Residuals are relative to the cotangent: the mean over entries of "rms" would cancel.
        stop = replace(self.stop, max_iter=self.stop.max_iter - spent, norm="l2")
        if isinstance(self.solver, LinearSolver):
            u, stats = self.solver.solve(
                lambda v: v - self.product(v), b, replace(stop, mode="abs"), eps=self.eps,
                first=None if first is None else b - first, scale=scale,
                peers=self.peers, spans=spans,
            )  # fmt: skip
            stats.nfe += spent
            return LinearSolution(u, stats)
        if first is not None:  # the solver counts its evaluation at b again
            stop, spent = replace(stop, max_iter=stop.max_iter + 1), spent - 1
        solver, start = self.solver, b  # b is the image of zero and costs no product
        if isinstance(solver, Shine):
            start, first = solver.start(b), None
        f = PackedFn(Packing(b), _Affine(self.product, b, first))
        f.eps, f.peers, f.spans = max(f.eps, self.eps), self.peers, spans
        outcome, stats = solve_packed(
            f, start, solver, stop, on_failure="ignore", scale=scale, shared=shared
        )
        stats.nfe += spent
        return LinearSolution(outcome.z, stats)


class _Affine:
    r"""The map $u \mapsto J^\top u + b$, with the product that a Newton method needs."""

    def __init__(self, product: Product, b: Tensor, first: Tensor | None = None) -> None:
        self.product, self.b, self.first = product, b, first

    def __call__(self, u: Tensor) -> Tensor:
        # Once: without samples all memory has the same address, and later calls must make products.
        first, self.first = self.first, None
        if first is not None and u.data_ptr() == self.b.data_ptr():
            return first + self.b
        return self.product(u) + self.b

    def jvp(self, u: Tensor, v: Tensor) -> Tensor:
        """Return the derivative along `v`: the map is affine."""
        return self.product(v)
