"""Implicit differentiation: the gradient of a fixed point from one linear system."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from torchdeq import _torch
from torchdeq._torch import compiler_loaded
from torchdeq.coupling import Coupling
from torchdeq.distributed.peers import Peers
from torchdeq.failures import check_policy
from torchdeq.grad.activations import Activations
from torchdeq.grad.adjoint import solve_adjoint, solve_batched_cotangents
from torchdeq.grad.base import BACKWARDS, Backward, NoGraph
from torchdeq.grad.second_call import SecondCall
from torchdeq.grad.shine import Shine
from torchdeq.linear import GMRES, LinearSolver
from torchdeq.modules import mixes_samples, uses_compiler
from torchdeq.packed import PackedFn
from torchdeq.randomness import Randomness
from torchdeq.registry import suggest
from torchdeq.solver import Broyden, Solver
from torchdeq.solver.secant import Secant
from torchdeq.stats import SolverStat
from torchdeq.stopping import StopRule

STARTS = ("zeros", "shine")


@BACKWARDS.register("ift")
@dataclass(frozen=True, kw_only=True)
class Implicit(Backward):
    r"""Gradient by the implicit function theorem.

    At $z^\star = f(z^\star, \theta)$, a loss $\ell$ with the cotangent $g$ of $z^\star$ has the
    gradient

    $$\frac{d\ell}{d\theta} = \left(\frac{\partial f}{\partial \theta}\right)^\top u,
    \qquad u = J^\top u + g$$

    with the Jacobian $J$ of $f$ in $z$. The tolerance is relative to $|g|$ (see
    `grad/adjoint.py`), so it means the same for every loss. One call of `f` with a graph at the
    solved state serves every product with $J^\top$. Memory does not depend on the number of steps
    of either solve. The backward pass does not call `f`, except that it calls a compiled `f` once,
    without gradients for its parameters.

    Args:
        solver: any fixed-point or linear solver.
        stop: budget of products and tolerance of the backward solve.
        higher_order: make the gradient itself differentiable, exactly and any number of times; the
            backward pass then evaluates `f` again. `torch.func` transforms and forward mode always
            compute this way.
        writer: called once per backward pass with the statistics of its solve.
        on_failure: how to report samples for which the backward solve failed: `"ignore"`, `"warn"`,
            `"raise"`, or `"auto"`, which warns.
        init: `"zeros"`, or `"shine"` to start from the inverse Jacobian of the forward solve; both
            solves must be Broyden's.
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
            raise ValueError(
                "init='shine' makes gradients of first order only: drop it, or drop higher_order"
            )

    def with_memory(self, memory: object) -> Implicit:
        """Return the method with the forward solver's inverse Jacobian, if `init` is "shine".

        Args:
            memory: the memory of the forward solver after its solve.
        """
        if self.init == "zeros" or not torch.is_grad_enabled():
            return self
        if not isinstance(self.solver, Broyden) or not isinstance(memory, Secant):
            return self  # the start met the tolerance: the solver has made no update
        return replace(self, solver=Shine.from_rule(self.solver, memory.H), init="zeros")

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
        if not _has_inputs(fz, h):
            return [split(fz.detach())]
        # Units inside f exchange their parameters themselves, so no second call can detach them.
        compiled = before is not None and not f.peers.units and uses_compiler(f.f)
        second_call = SecondCall(f, before) if before is not None and compiled else None
        running = getattr(f.f, "running", nullcontext)  # of a map that `compile_f` has compiled
        call = _AttachedCall(
            self, f.eps, coupling_of(f), f.peers, activations, second_call, running
        )
        return [split(_ImplicitGradient.apply(fz, h, call))]  # type: ignore[no-untyped-call]


def coupling_of(f: PackedFn) -> Coupling:
    """Return the declared coupling of samples, or else the coupling that is visible in `f`.

    A state with one number per sample is one vector; batch normalisation in training mixes the
    samples. None leaves the test to the backward solve.
    """
    if f.coupled is not None:
        return f.coupled
    return "adjoint" if f.packing.leaves[0].dim == 1 or mixes_samples(f.f) else None


@dataclass(frozen=True)
class _AttachedCall:
    """The data of a call of `f` with a graph that its backward pass needs."""

    method: Implicit
    eps: float
    coupled: Coupling
    peers: Peers
    activations: Activations
    second_call: SecondCall | None
    running: Callable[[], AbstractContextManager[Any]]  # a block for all products

    def adjoint(self, fz: Tensor, h: Tensor, g: Tensor) -> Tensor:
        """Return `u` with `u = J^T u + g`, for one cotangent (B, D) or several at once."""

        def vjp(u: Tensor) -> Tensor:
            (product,) = torch.autograd.grad(fz, h, u, retain_graph=True, allow_unused=True)
            return torch.zeros_like(u) if product is None else product

        solve = partial(
            solve_adjoint, self.method, coupled=self.coupled, eps=self.eps, peers=self.peers
        )
        with self.activations.unpacked(), self.running():
            if _torch.is_legacy_batched(g):
                return solve_batched_cotangents(solve, vjp, g)
            return solve(lambda v: vjp(v[0])[None], g[None])[0]


class _ImplicitGradient(torch.autograd.Function):
    r"""The identity on `f(h)` whose backward replaces $g$ by $(I - J^\top)^{-1} g$."""

    @staticmethod
    def forward(ctx: Any, fz: Tensor, h: Tensor, call: _AttachedCall) -> Tensor:
        ctx.save_for_backward(fz, h)
        ctx.call = call
        return fz.clone()  # the caller may write into it

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "this implicit gradient is of first order only, but create_graph=True asks for a "
                "higher order: pass higher_order=True"
            )
        fz, h = ctx.saved_tensors
        if ctx.call.second_call is not None:
            fz, h = ctx.call.second_call.repeated(fz, h)
        return ctx.call.adjoint(fz, h, g), None, None


def _has_inputs(fz: Tensor, h: Tensor) -> bool:
    """Return whether the graph of `fz` has leaves other than `h`; stop at the first one."""
    if fz.is_leaf:
        return fz is not h
    visited, pending = set(), [fz.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and leaf is not h:
            return True
        pending.extend(parent for parent, _ in node.next_functions)
    return False
