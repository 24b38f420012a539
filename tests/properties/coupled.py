"""Rows that depend on each other, and counters of the products that a gradient costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests import problems
from torchdeq.functional import fixed_point
from torchdeq.grad import Implicit, make_adjoint_solver
from torchdeq.linear import LINEAR
from torchdeq.solver import SOLVERS, Coupling, FixedPointIter, StopRule

Map = Callable[[Tensor], Tensor]

DOUBLE = torch.float64
ADJOINTS = [*SOLVERS, *LINEAR]
#: Plain iterations: each step is the same whether rows are one system or many. A row that stops
#: where its own residual is small still misses what other rows send it later.
PLAIN = ("fixed_point_iter", "simple_fixed_point_iter", "neumann")
PROBED = [name for name in ADJOINTS if name not in PLAIN and name != "auto"]


def implicit(name: str, max_iter: int = 60, tol: float = 1e-9, **options: Any) -> Implicit:
    """Return implicit differentiation with a solver by its name."""
    return Implicit(solver=make_adjoint_solver(name, {}), stop=StopRule(max_iter, tol), **options)


def solve_plainly(
    f: Map, x: Tensor, backward: Implicit | None = None, coupled: Coupling = None
) -> Tensor:
    """Return the fixed point by plain iteration from zeros in the shape of `x`."""
    return fixed_point(f, torch.zeros_like(x), solver=FixedPointIter(), coupled=coupled,
                       stop=StopRule(60, 1e-10), backward=backward).z  # fmt: skip


def sequential(seed: int = 0) -> tuple[Any, Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
    """Return the chain as rows, its tensors, a cotangent, and the gradients by the sequence."""
    at_once, step_by_step, W, x = problems.chain(seed=seed)
    W, x = W.requires_grad_(), x.requires_grad_()
    g = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)
    return at_once, W, x, g, torch.autograd.grad(step_by_step(W, x), (W, x), g)


class _CountedProducts(torch.autograd.Function):
    """The identity; its backward counts the products with the Jacobian of a map."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, calls: list[int]) -> Tensor:
        ctx.calls = calls
        return z.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        ctx.calls.append(1)
        return g, None


def counting(f: Map) -> tuple[Map, list[int]]:
    """Return a map, and a list that grows by one entry with every product of its Jacobian."""
    calls: list[int] = []
    return lambda z: f(_CountedProducts.apply(z, calls)), calls
