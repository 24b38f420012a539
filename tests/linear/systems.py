"""Batches of linear systems with dense solutions in float64."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests import problems

Product = Callable[[Tensor], Tensor]


class Batch:
    """Four well-conditioned systems with a matrix each; a call is a product, and is counted."""

    def __init__(self, dtype: torch.dtype = torch.float32, d: int = 10, rho: float = 0.6) -> None:
        Js = torch.stack([problems.contraction(rho, d, seed=i) for i in range(4)])
        self.A64 = torch.eye(d, dtype=torch.float64) - Js
        self.A = self.A64.to(torch.promote_types(dtype, torch.float32))
        generator = torch.Generator().manual_seed(3)
        self.b = torch.randn(4, d, generator=generator, dtype=torch.float64).to(dtype)
        self.calls = 0

    def __call__(self, v: Tensor) -> Tensor:
        self.calls += 1
        return torch.einsum("bij,bj->bi", self.A[: len(v)], v.to(self.A.dtype)).to(v.dtype)

    def exact(self, b: Tensor) -> Tensor:
        """Return the dense solutions for right-hand sides `b`."""
        return torch.linalg.solve(self.A64[: len(b)], b.double().unsqueeze(2)).squeeze(2)


def times(A: Tensor) -> Product:
    """Return the product with one matrix for all rows."""
    return lambda v: v @ A.mT


def system(
    J: Tensor, batch: int = 3, dtype: torch.dtype = torch.float64
) -> tuple[Product, Tensor, Tensor]:
    """Return the product, right-hand sides and dense solutions of `(I - J) x = b`."""
    A = torch.eye(len(J), dtype=torch.float64) - J
    b = torch.randn(batch, len(J), dtype=torch.float64)
    x = torch.linalg.solve(A, b.mT).mT
    A = A.to(dtype)
    return times(A), b.to(dtype), x


def error(x: Tensor, exact: Tensor) -> Tensor:
    """Return (B,) the error of each row relative to its exact solution."""
    return (x.double() - exact).norm(dim=1) / exact.norm(dim=1)
