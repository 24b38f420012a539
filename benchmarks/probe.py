"""Counts of evaluations and products with the Jacobian, and the solution of the adjoint solve."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.cases import rows


class Ask(NamedTuple):
    """A differentiable solve: budget and tolerance of both of its solves."""

    solver: str
    calls: int
    tol: float  # relative, of the forward solve
    adjoint: str
    products: int
    adjoint_tol: float  # relative to the cotangent
    size: float = 1.0  # of the cotangent: the smallest norm of a sample


class Probe:
    r"""`f` with its calls and products counted, and a zero `e` added to every image.

    The gradient of $z^\star = f(z^\star) + e$ by $e$ is the adjoint state $u$
    itself.
    """

    def __init__(self, f: Callable[[Tensor], Tensor], z0: Tensor) -> None:
        self.f, self.e = f, torch.zeros_like(z0).requires_grad_()
        self.calls = self.products = 0
        self.point = self.image = z0

    def __call__(self, z: Tensor) -> Tensor:
        self.calls += 1
        fz: Tensor = _Counted.apply(self.f(z), self)  # type: ignore[no-untyped-call]
        if fz.requires_grad:
            self.point, self.image = z, fz
        return fz + self.e

    def adjoint(self, z: Tensor, g: Tensor) -> Tensor:
        """Return the adjoint state of a cotangent of `z`; keep the last graph of `f`."""
        return torch.autograd.grad(z, self.e, g, retain_graph=True)[0]

    def residual(self, u: Tensor, g: Tensor) -> float:
        r"""Return the worst $|J^\top u + g - u| / |g|$ of the batch, by one more product."""
        product = torch.autograd.grad(self.image, self.point, u, retain_graph=True)[0]
        return worst(rows(product + g - u), rows(g))


class _Counted(torch.autograd.Function):
    """The identity; counts how often a cotangent goes through."""

    @staticmethod
    def forward(ctx: Any, fz: Tensor, probe: Probe) -> Tensor:
        ctx.probe = probe
        return fz.view_as(fz)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        ctx.probe.products += 1
        return g, None


def worst(gap: Tensor, size: Tensor) -> float:
    """Return the largest ratio of norms, sample by sample."""
    norm = torch.linalg.vector_norm
    return float((norm(gap, dim=1) / norm(size, dim=1)).max())
