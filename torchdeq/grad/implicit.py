"""Implicit differentiation: the gradient of a fixed point from one linear system."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from torchdeq.grad.base import BACKWARDS, Backward
from torchdeq.linear import GMRES, LinearSolution, LinearSolver
from torchdeq.packing import PackedFn
from torchdeq.solver import Solver, SolverStat, StopRule, solve
from torchdeq.solver.loop import report_failures


@BACKWARDS.register("ift")
@dataclass(frozen=True, kw_only=True)
class Implicit(Backward):
    r"""Gradient by the implicit function theorem.

    At :math:`z^\star = f(z^\star, \theta)` a cotangent :math:`g` of :math:`z^\star` becomes

    .. math:: u = J^\top u + g, \qquad
              \frac{d\ell}{d\theta} = \frac{\partial f}{\partial \theta}^\top u

    The system is solved for :math:`g / |g|`, sample by sample, and scaled back, so a tolerance
    means the same for every loss. One call of ``f`` with a graph at the solved state serves every
    product with :math:`J^\top`; memory does not depend on the steps of either solve, and ``f`` is
    not run again in the backward pass.

    Args:
        solver: any fixed-point or linear solver.
        stop: budget of products and tolerance of the backward solve.
        higher_order: make the gradient itself differentiable, exactly and any number of times, at
            the price of evaluating ``f`` again in the backward pass. Under ``torch.func``
            transforms and in forward mode this is so in any case.
        writer: called once per backward pass with the statistics of its solve.
        on_failure: ignore, warn or raise if the backward solve fails for some samples.
    """

    solver: Solver[Any] | LinearSolver = field(default_factory=GMRES)
    stop: StopRule = field(default_factory=lambda: StopRule(40, 1e-6))
    higher_order: bool = False
    writer: Callable[[SolverStat], object] | None = None
    on_failure: str = "warn"

    def attach(self, f: PackedFn, z: Tensor) -> list[list[Tensor]]:
        split = f.packing.split
        if not torch.is_grad_enabled():
            return [split(f(z))]
        h = z.detach().requires_grad_()
        fz = f(h)
        if not fz.requires_grad:
            raise RuntimeError(
                "f returned a tensor without a graph although its input requires grad: it runs "
                "under no_grad, or detaches; nothing could be differentiated"
            )
        if not _reaches_more_than(fz, h):
            return [split(fz.detach())]
        return [split(_Adjoint.apply(fz, h, self))]  # type: ignore[no-untyped-call]

    def solve_adjoint(self, vjp: Callable[[Tensor], Tensor], g: Tensor) -> Tensor:
        """``u`` with ``u = vjp(u) + g``; tells the writer, and about failures."""
        size = torch.linalg.vector_norm(g, dim=1)
        most = torch.where(size.amax() > 0, size.amax(), 1.0) if len(g) else size.sum()
        b = g / most  # one number for the whole batch: samples may depend on each other
        if isinstance(self.solver, LinearSolver):
            u, stats = self._solve_linear(self.solver, vjp, b)
        else:
            # From b itself: the image of zero, known without a product.
            scale = torch.where(size > 0, size, most) / most
            found = solve(
                _Affine(vjp, b), b, self.solver, self.stop, on_failure="ignore", scale=scale
            )
            u, stats = found.z, found.stats
        if self.writer is not None:
            self.writer(stats)
        if self.on_failure != "ignore" and self.stop.goal and self.stop.max_iter:
            report_failures(stats, self.on_failure, "the backward solve")
        return u * most

    def _solve_linear(
        self, solver: LinearSolver, vjp: Callable[[Tensor], Tensor], b: Tensor
    ) -> LinearSolution:
        stop = self.stop if self.stop.tol is None else replace(self.stop, mode="rel")
        alone = solver.solve(lambda v: v - vjp(v), b, stop)
        if len(b) < 2 or not stop.goal or not bool(alone.stats.failed.any()):
            return alone
        # Samples that depend on each other, as in batch normalisation, are one system.
        flat = b.reshape(1, -1)
        u, stats = solver.solve(lambda v: v - vjp(v.view_as(b)).view_as(v), flat, stop)
        if not bool(stats.converged.all()):
            return alone
        values = {key: value.expand(len(b), *value.shape[1:]) for key, value in stats.items()}
        status = stats.status.expand(len(b))
        return LinearSolution(u.view_as(b), SolverStat(values, nfe=stats.nfe, status=status))


class _Adjoint(torch.autograd.Function):
    """The identity on ``f(h)`` whose backward replaces ``g`` by ``(I - J^T)^-1 g``."""

    @staticmethod
    def forward(ctx: Any, fz: Tensor, h: Tensor, method: Implicit) -> Tensor:
        ctx.save_for_backward(fz, h)
        ctx.method = method
        return fz.view_as(fz)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "this implicit gradient is of first order, and create_graph asks for more: pass "
                "higher_order=True"
            )
        fz, h = ctx.saved_tensors

        def vjp(u: Tensor) -> Tensor:
            (product,) = torch.autograd.grad(fz, h, u, retain_graph=True, allow_unused=True)
            return torch.zeros_like(u) if product is None else product

        return ctx.method.solve_adjoint(vjp, g), None, None


@dataclass
class _Affine:
    """``u -> J^T u + b``, with the product that a Newton method needs."""

    product: Callable[[Tensor], Tensor]
    b: Tensor

    def __call__(self, u: Tensor) -> Tensor:
        return self.product(u) + self.b

    def jvp(self, u: Tensor, v: Tensor) -> Tensor:
        """The derivative along ``v``: the map is affine."""
        return self.product(v)


def _reaches_more_than(fz: Tensor, h: Tensor) -> bool:
    """Whether the graph of ``fz`` leads to a leaf other than ``h``."""
    seen, todo = set(), [fz.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and leaf is not h:
            return True
        todo.extend(parent for parent, _ in node.next_functions)
    return False
