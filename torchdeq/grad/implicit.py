"""Implicit differentiation: the gradient of a fixed point from one linear system."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from torchdeq import _torch
from torchdeq.coupling import Coupling
from torchdeq.failures import check_policy
from torchdeq.grad.activations import Activations
from torchdeq.grad.adjoint import on_all_cotangents, solve_adjoint
from torchdeq.grad.base import BACKWARDS, Backward, NoGraph
from torchdeq.grad.shine import Shine
from torchdeq.linear import GMRES, LinearSolver
from torchdeq.modules import ModuleState, mixes_samples
from torchdeq.packed import PackedFn
from torchdeq.randomness import Randomness
from torchdeq.registry import suggest
from torchdeq.solver import Broyden, Solver
from torchdeq.solver.broyden import Secant
from torchdeq.stats import SolverStat
from torchdeq.stopping import StopRule
from torchdeq.tracing import compiler_loaded

STARTS = ("zeros", "shine")


@BACKWARDS.register("ift")
@dataclass(frozen=True, kw_only=True)
class Implicit(Backward):
    r"""Gradient by the implicit function theorem.

    At :math:`z^\star = f(z^\star, \theta)` a cotangent :math:`g` of :math:`z^\star` becomes

    .. math:: u = J^\top u + g, \qquad
              \frac{d\ell}{d\theta} = \frac{\partial f}{\partial \theta}^\top u

    The tolerance is relative to :math:`|g|` (see ``grad/adjoint.py``), so it means the same for
    every loss. One call of ``f`` with a graph at the solved state serves every product with
    :math:`J^\top`; memory does not depend on the steps of either solve, and ``f`` is not run again
    in the backward pass, unless it is compiled: then once, without its parameters.

    Args:
        solver: any fixed-point or linear solver.
        stop: budget of products and tolerance of the backward solve.
        higher_order: make the gradient itself differentiable, exactly and any number of times, at
            the price of evaluating ``f`` again in the backward pass. Under ``torch.func``
            transforms and in forward mode this is so in any case.
        writer: called once per backward pass with the statistics of its solve.
        on_failure: ignore, warn or raise if the backward solve fails for some samples; auto warns.
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
        check_policy(self.on_failure)
        if self.init not in STARTS:
            raise ValueError(f"unknown start {self.init!r}{suggest(self.init, STARTS)}")
        if self.init == "shine" and not isinstance(self.solver, Broyden):
            raise ValueError(
                "init='shine' reuses Broyden's inverse Jacobian: the backward solver must be "
                f"broyden, got {type(self.solver).__name__}"
            )
        if self.init == "shine" and self.higher_order:
            raise ValueError("init='shine' works for gradients of first order: drop higher_order")

    def with_memory(self, memory: object) -> Implicit:
        """Return the method with what the forward solver remembers, if `init` asks for that."""
        if self.init == "zeros" or not torch.is_grad_enabled():
            return self
        if not isinstance(self.solver, Broyden) or not isinstance(memory, Secant):
            return self  # the start was within the tolerance: the solver learnt nothing
        return replace(self, solver=Shine.after(self.solver, memory.H), init="zeros")

    def attach(self, f: PackedFn, z: Tensor) -> list[list[Tensor]]:
        split = f.packing.split
        if not torch.is_grad_enabled():
            return [split(f(z))]
        h = z.detach().requires_grad_()
        before = Randomness(z.device) if compiler_loaded() else None
        activations = Activations()
        with activations:
            fz = f(h)
        if not fz.requires_grad:
            raise NoGraph
        leads_on, compiled = _survey(fz, h)
        if not leads_on:
            return [split(fz.detach())]
        again = _Again(f, before) if before is not None and compiled else None
        call = _AttachedCall(self, f.eps, coupling_of(f), activations, again)
        return [split(_ImplicitGradient.apply(fz, h, call))]  # type: ignore[no-untyped-call]


def coupling_of(f: PackedFn) -> Coupling:
    """Return what is known about the coupling of samples before any product is made.

    A state of single numbers is one vector; batch normalisation in training mixes the batch.
    """
    if f.coupled is not None:
        return f.coupled
    return "adjoint" if f.packing.leaves[0].dim == 1 or mixes_samples(f.f) else None


@dataclass(frozen=True)
class _AttachedCall:
    """What the backward pass needs beside the graph of the attached call."""

    method: Implicit
    eps: float
    coupled: Coupling
    activations: Activations
    again: _Again | None

    def adjoint(self, fz: Tensor, h: Tensor, g: Tensor) -> Tensor:
        """Return `u` with `u = J^T u + g`, for (B, D) or several cotangents at once."""

        def vjp(u: Tensor) -> Tensor:
            (product,) = torch.autograd.grad(fz, h, u, retain_graph=True, allow_unused=True)
            return torch.zeros_like(u) if product is None else product

        solve = partial(solve_adjoint, self.method, coupled=self.coupled, eps=self.eps)
        with self.activations.unpacked():
            if _torch.is_legacy_batched(g):
                return on_all_cotangents(solve, vjp, g)
            return solve(lambda v: vjp(v[0])[None], g[None])[0]


class _ImplicitGradient(torch.autograd.Function):
    """The identity on `f(h)` whose backward replaces `g` by `(I - J^T)^-1 g`."""

    @staticmethod
    def forward(ctx: Any, fz: Tensor, h: Tensor, call: _AttachedCall) -> Tensor:
        ctx.save_for_backward(fz, h)
        ctx.call = call
        return fz.clone()  # the caller may write into it

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "this implicit gradient is of first order, and create_graph asks for more: pass "
                "higher_order=True"
            )
        fz, h = ctx.saved_tensors
        if ctx.call.again is not None:
            h = h.detach().requires_grad_()
            fz = ctx.call.again(h)
        return ctx.call.adjoint(fz, h, g), None, None


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


def _survey(fz: Tensor, h: Tensor) -> tuple[bool, bool]:
    """Whether the graph of ``fz`` leads to a leaf other than ``h``; whether it was compiled."""
    seen, todo = set(), [fz.grad_fn]
    leads_on, compiled = fz.is_leaf and fz is not h, False
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
