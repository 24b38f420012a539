"""Maps with known Jacobians."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests import problems

Map = Callable[[Tensor], Tensor]


def linear_maps(matrices: list[Tensor]) -> tuple[Map, Tensor]:
    """Return the map of a batch with a matrix for each sample, and a random state."""
    A = torch.stack(matrices)
    b = torch.linspace(-1, 1, A.shape[1], dtype=A.dtype)
    return lambda z: torch.einsum("bij,bj->bi", A, z) + b, torch.randn(A.shape[:2], dtype=A.dtype)


def jordan(value: float, length: int, d: int = 6) -> Tensor:
    """Return a matrix with one Jordan chain of an eigenvalue, and smaller eigenvalues."""
    A = torch.diag(torch.linspace(0.05, 0.2, d, dtype=torch.float64))
    A[:length, :length] = value * torch.eye(length, dtype=torch.float64)
    for i in range(length - 1):
        A[i, i + 1] = 1.0
    T = torch.eye(d, dtype=torch.float64) + 0.2 * problems.contraction(1.0, d, seed=3)
    return T @ A @ torch.linalg.inv(T)


def dense_jacobian(f: Map, z: Tensor) -> Tensor:
    """Return (B, D, D, or coupled B D, B D) the dense Jacobian of the flattened map."""
    J: Tensor = torch.autograd.functional.jacobian(lambda v: f(v.view_as(z)).flatten(), z.flatten())
    return J


def drifting(batch: int = 3, d: int = 8, seed: int = 0) -> tuple[Map, Tensor]:
    """Return a residual block behind a norm that removes the mean: it has no fixed point."""
    W = problems.contraction(0.5, d, seed)
    x = torch.randn(batch, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))

    def f(z: Tensor) -> Tensor:
        return z + torch.tanh(torch.nn.functional.layer_norm(z, (d,)) @ W.mT + x)

    return f, torch.zeros(batch, d, dtype=torch.float64)
