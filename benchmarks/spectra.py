"""Jacobians with known spectra, and the maps they belong to.

The maps are $f(z) = \\tanh(W z + x)$, the Jacobians those at their fixed points.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Generator, Tensor

BATCH, WIDTH = 8, 256
BELOW = (0.5, 0.9, 0.99)
ABOVE = {"disk": 1.13, "decaying": 1.03, "symmetric": 1.02}
# Gains of W at which the largest spectral radius of the batch is that of BELOW, from a bisection.
GAINS = {
    "disk": (0.51662734, 0.96292824, 1.05780715),
    "decaying": (0.53815185, 0.97898458, 1.09137134),
    "symmetric": (0.53468400, 1.01240260, 1.18364097),
}


class Problem(NamedTuple):
    """A map with its fixed point in float64, and its Jacobians in float32."""

    W: Tensor  # (D, D)
    x: Tensor  # (B, D)
    J: Tensor  # (B, D, D)
    g: Tensor  # (B, D), cotangents of size 1


def problem(spectrum: str, radius: float) -> Problem:
    """Return a problem; above a radius of 1 no fixed point is stable, so scale a Jacobian up."""
    rng = Generator().manual_seed(3)
    W = SPECTRA[spectrum](rng)
    x = 0.3 * _normal(rng, BATCH, WIDTH)
    stable = min(radius, BELOW[-1])
    W = W * GAINS[spectrum][BELOW.index(stable)]
    z = _fixed_point(W, x)
    J = (1 - z.square())[:, :, None] * W * (radius / stable)
    g = torch.randn(BATCH, WIDTH, generator=Generator().manual_seed(7))
    return Problem(W, x, J.float(), g / torch.linalg.vector_norm(g, dim=1, keepdim=True))


def disk(rng: Generator) -> Tensor:
    """Return a matrix with eigenvalues all over a disk."""
    return _normal(rng, WIDTH, WIDTH).mul_(WIDTH**-0.5)


def decaying(rng: Generator) -> Tensor:
    """Return a matrix with a few large eigenvalues of both signs, decaying ones, and some noise."""
    Q = torch.linalg.qr(_normal(rng, WIDTH, WIDTH))[0]
    sizes = [0.93**i * (1 if i % 3 else -1) for i in range(WIDTH)]
    noise = _normal(rng, WIDTH, WIDTH).mul_(0.02 * WIDTH**-0.5)
    return torch.addmm(noise, Q * torch.tensor(sizes, dtype=torch.float64), Q.mT)


def symmetric(rng: Generator) -> Tensor:
    """Return a matrix with real eigenvalues, evenly between -1 and 1."""
    Q = torch.linalg.qr(_normal(rng, WIDTH, WIDTH))[0]
    return torch.mm(Q * torch.linspace(-1, 1, WIDTH, dtype=torch.float64), Q.mT)


SPECTRA: dict[str, Callable[[Generator], Tensor]] = {
    "disk": disk,
    "decaying": decaying,
    "symmetric": symmetric,
}


def _normal(rng: Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=rng, dtype=torch.float64)


def _fixed_point(W: Tensor, x: Tensor) -> Tensor:
    """Return the fixed point, by Newton's method with dense Jacobians."""
    z, eye = torch.zeros_like(x), torch.eye(WIDTH, dtype=x.dtype)
    for _ in range(20):
        fz = torch.tanh(z @ W.mT + x)
        J = (1 - fz.square())[:, :, None] * W
        z = z + torch.linalg.solve(eye - J, fz - z)
    return z
