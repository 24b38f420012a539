"""Implicit differentiation: the gradient of a fixed point from one linear system."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.utils._pytree import tree_map

from torchdeq.grad.base import BACKWARDS, Backward, NoGraph
from torchdeq.grad.shine import Shine
from torchdeq.linear import GMRES, LinearSolution, LinearSolver
from torchdeq.modules import ModuleState, mixes_samples
from torchdeq.packing import PackedFn
from torchdeq.randomness import Randomness
from torchdeq.registry import suggest
from torchdeq.solver import Broyden, Solution, Solver, SolverStat, StopRule, solve
from torchdeq.solver.broyden import Secant
from torchdeq.solver.loop import POLICIES, report_failures
from torchdeq.tracing import compiler_loaded

STARTS = ("zeros", "shine")


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
        init: ``"zeros"``, or ``"shine"`` to start from the inverse Jacobian of the forward solve;
            both solves must be Broyden's.
    """

    solver: Solver[Any] | LinearSolver = field(default_factory=GMRES)
    stop: StopRule = field(default_factory=lambda: StopRule(40, 1e-6))
    higher_order: bool = False
    writer: Callable[[SolverStat], object] | None = None
    on_failure: str = "warn"
    init: Literal["zeros", "shine"] = "zeros"

    def __post_init__(self) -> None:
        if self.on_failure not in POLICIES:
            raise ValueError(
                f"unknown failure policy {self.on_failure!r}{suggest(self.on_failure, POLICIES)}"
            )
        if self.init not in STARTS:
            raise ValueError(f"unknown start {self.init!r}{suggest(self.init, STARTS)}")
        if self.init == "shine" and not isinstance(self.solver, Broyden):
            raise ValueError(
                "init='shine' reuses Broyden's inverse Jacobian: the backward solver must be "
                f"broyden, got {type(self.solver).__name__}"
            )
        if self.init == "shine" and self.higher_order:
            raise ValueError("init='shine' works for gradients of first order: drop higher_order")

    def informed(self, found: Solution) -> Implicit:
        if self.init == "zeros" or not torch.is_grad_enabled():
            return self
        if not isinstance(self.solver, Broyden) or not isinstance(found.memory, Secant):
            return self  # the first guess was within the tolerance: nothing was learnt
        return replace(self, solver=Shine.after(self.solver, found.memory.H), init="zeros")

    def attach(self, f: PackedFn, z: Tensor) -> list[list[Tensor]]:
        split = f.packing.split
        if not torch.is_grad_enabled():
            return [split(f(z))]
        h = z.detach().requires_grad_()
        before = Randomness(z.device) if compiler_loaded() else None
        fz = f(h)
        if not fz.requires_grad:
            raise NoGraph
        leads_on, compiled = _survey(fz, h)
        if not leads_on:
            return [split(fz.detach())]
        again = _Again(f, before) if before is not None and compiled else None
        together = f.packing.leaves[0].dim == 1 or mixes_samples(f.f)
        return [split(_Adjoint.apply(fz, h, self, again, together))]  # type: ignore[no-untyped-call]

    def solve_adjoint(
        self, vjp: Callable[[Tensor], Tensor], g: Tensor, together: bool = False
    ) -> Tensor:
        """``u`` with ``u = vjp(u) + g``; tells the writer, and about failures.

        Args:
            vjp: products with the transposed Jacobian, (B, D) to (B, D).
            g: the cotangent.
            together: samples depend on each other: a linear solver takes them as one system.
        """
        if is_legacy_batchedtensor(g):
            return self._solve_batched(vjp, g)
        # First by the largest entry: squares of very large or small cotangents leave the range.
        top = _or_one(g.abs().amax()) if g.numel() else g.new_ones(())
        size = torch.linalg.vector_norm(g / top, dim=1)
        most = _or_one(size.amax()) if len(g) else size.sum()
        b = g / top / most  # one number for the whole batch: samples may depend on each other
        if isinstance(self.solver, LinearSolver):
            u, stats = self._solve_linear(self.solver, vjp, b, together)
        else:
            # From b itself: the image of zero, known without a product.
            start = self.solver.start(b) if isinstance(self.solver, Shine) else b
            scale = torch.where(size > 0, size, most) / most
            found = solve(
                _Affine(vjp, b), start, self.solver, self.stop, on_failure="ignore", scale=scale
            )
            u, stats = found.z, found.stats
        if self.writer is not None:
            self.writer(stats)
        if self.on_failure != "ignore" and self.stop.goal and self.stop.max_iter:
            report_failures(stats, self.on_failure, "the backward solve")
        return u * most * top

    def _solve_batched(self, vjp: Callable[[Tensor], Tensor], g: Tensor) -> Tensor:
        """Several cotangents at once (``is_grads_batched``): rows of one plain system."""
        level = torch._C._vmapmode_increment_nesting() - 1
        torch._C._vmapmode_decrement_nesting()

        def plain(t: Tensor) -> Tensor:
            return torch._remove_batch_dim(t, level, len(cotangents), 0)

        cotangents = torch._remove_batch_dim(g, level, 1, 0)  # (N, B, D)

        def product(u: Tensor) -> Tensor:
            batched = torch._add_batch_dim(u.view_as(cotangents), 0, level)
            return plain(vjp(batched)).reshape(u.shape)

        u = self.solve_adjoint(product, cotangents.flatten(0, 1))
        return torch._add_batch_dim(u.view_as(cotangents), 0, level)

    def _solve_linear(
        self, solver: LinearSolver, vjp: Callable[[Tensor], Tensor], b: Tensor, together: bool
    ) -> LinearSolution:
        stop = self.stop if self.stop.tol is None else replace(self.stop, mode="rel")
        if len(b) < 2:
            return solver.solve(lambda v: v - vjp(v), b, stop)
        if together:
            return _as_one(solver, vjp, b, stop)
        alone = solver.solve(lambda v: v - vjp(v), b, stop)
        left = stop.max_iter - alone.stats.nfe
        if not left or not stop.goal or not bool(alone.stats.failed.any()):
            return alone
        # It may be that samples depend on each other after all.
        joint = _as_one(solver, vjp, b, replace(stop, max_iter=left))
        joint.stats.nfe += alone.stats.nfe
        return joint if bool(joint.stats.converged.all()) else alone


def _as_one(
    solver: LinearSolver, vjp: Callable[[Tensor], Tensor], b: Tensor, stop: StopRule
) -> LinearSolution:
    """All samples as one system."""
    flat = b.reshape(1, -1)
    u, stats = solver.solve(lambda v: v - vjp(v.view_as(b)).view_as(v), flat, stop)
    values = {key: value.expand(len(b), *value.shape[1:]) for key, value in stats.items()}
    status = stats.status.expand(len(b))
    return LinearSolution(u.view_as(b), SolverStat(values, nfe=stats.nfe, status=status))


def _or_one(t: Tensor) -> Tensor:
    return torch.where(t > 0, t, 1.0)


class _Adjoint(torch.autograd.Function):
    """The identity on ``f(h)`` whose backward replaces ``g`` by ``(I - J^T)^-1 g``."""

    @staticmethod
    def forward(
        ctx: Any, fz: Tensor, h: Tensor, method: Implicit, again: _Again | None, together: bool
    ) -> Tensor:
        ctx.save_for_backward(fz, h)
        ctx.method, ctx.again, ctx.together = method, again, together
        return fz.clone()  # the caller may write into it

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "this implicit gradient is of first order, and create_graph asks for more: pass "
                "higher_order=True"
            )
        fz, h = ctx.saved_tensors
        if ctx.again is not None:
            h = h.detach().requires_grad_()
            fz = ctx.again(h)

        def vjp(u: Tensor) -> Tensor:
            (product,) = torch.autograd.grad(fz, h, u, retain_graph=True, allow_unused=True)
            return torch.zeros_like(u) if product is None else product

        u = ctx.method.solve_adjoint(vjp, g, ctx.together)
        return u, None, None, None, None


class _Again:
    """``f`` once more, for products with its Jacobian alone.

    The backward of a compiled ``f`` computes the gradients of all its inputs at every product; this
    call leaves the parameters out.
    """

    def __init__(self, f: PackedFn, before: Randomness) -> None:
        self._modules, self._randomness = ModuleState(f.f), before
        self._f = copy(f)
        self._f.args = tree_map(lambda t: t.detach() if isinstance(t, Tensor) else t, f.args)

    def __call__(self, h: Tensor) -> Tensor:
        modules = self._modules.restored(statistics="copied", detached=True)
        with torch.enable_grad(), modules, self._randomness.replayed():
            return self._f(h)


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


def _survey(fz: Tensor, h: Tensor) -> tuple[bool, bool]:
    """Whether the graph of ``fz`` leads to a leaf other than ``h``; whether it was compiled."""
    seen, todo = set(), [fz.grad_fn]
    leads_on = compiled = False
    compiler = compiler_loaded()
    while todo and not (leads_on and (compiled or not compiler)):
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        leads_on |= leaf is not None and leaf is not h
        compiled |= compiler and node.name() == "CompiledFunctionBackward"
        todo.extend(parent for parent, _ in node.next_functions)
    return leads_on, compiled
