"""Fixed-point problems with exact solutions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Map = Callable[[Tensor], Tensor]

#: The fixed point of the cosine.
COSINE = 0.7390851332151607


def affine(
    A: Tensor, batch: int = 3, seed: int = 0, dtype: torch.dtype = torch.float64
) -> tuple[Map, Tensor, Tensor]:
    """Return the map `f(z) = A z + b` for random `b`, a zero start and the dense solution."""
    generator = torch.Generator().manual_seed(seed)
    d = len(A)
    b = torch.randn(batch, d, generator=generator, dtype=torch.float64)
    exact = torch.linalg.solve(torch.eye(d, dtype=torch.float64) - A.double(), b.mT).mT
    A, b = A.to(dtype), b.to(dtype)
    return lambda z: z @ A.mT + b, torch.zeros(batch, d, dtype=dtype), exact


def contraction(rho: float, d: int = 8, seed: int = 0) -> Tensor:
    """Return a random matrix of spectral norm `rho`."""
    A = _normal(d, d, seed=seed)
    return rho * A / torch.linalg.matrix_norm(A, 2)


def rotation(rho: float, d: int = 8, seed: int = 0) -> Tensor:
    """Return a scaled random rotation: its eigenvalues `rho exp(+-i phi)` are not real."""
    generator = torch.Generator().manual_seed(seed)
    A = torch.zeros(d, d, dtype=torch.float64)
    for i in range(0, d, 2):
        phi = 0.4 + 2.2 * torch.rand((), generator=generator, dtype=torch.float64)
        c, s = torch.cos(phi), torch.sin(phi)
        A[i : i + 2, i : i + 2] = rho * torch.stack((torch.stack((c, -s)), torch.stack((s, c))))
    Q, _ = torch.linalg.qr(_normal(d, d, seed=seed + 1))
    return Q @ A @ Q.mT


def non_normal(d: int = 8) -> Tensor:
    """Return a matrix of spectral radius 0.5 but norm 1.5: iterates grow before they shrink."""
    eye = torch.eye(d + 1, dtype=torch.float64)
    return 0.5 * eye[:d, :d] + eye[:d, 1:]


def repelling(d: int = 8, seed: int = 0) -> Tensor:
    """Return a matrix with eigenvalues in [-3, 0.5]: undamped plain iteration diverges.

    Damping by 0.3 makes the map a contraction.
    """
    Q, _ = torch.linalg.qr(_normal(d, d, seed=seed))
    return Q @ torch.diag(torch.linspace(-3.0, 0.5, d, dtype=torch.float64)) @ Q.mT


def tanh_layer(
    batch: int = 4,
    d: int = 16,
    gain: float = 0.9,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> tuple[Map, Tensor]:
    """Return the map `tanh(W z + x)` with `|W| = gain`, and a zero start."""
    W = contraction(gain, d, seed).to(dtype)
    x = _normal(batch, d, seed=seed + 7).to(dtype)
    return lambda z: torch.tanh(z @ W.mT + x), torch.zeros(batch, d, dtype=dtype)


def opaque_cosine(z: Tensor) -> Tensor:
    """Return the cosine, without forward-mode differentiation."""
    image: Tensor = _OpaqueCosine.apply(z)
    return image


class _OpaqueCosine(torch.autograd.Function):
    @staticmethod
    def forward(z: Tensor) -> Tensor:
        return torch.cos(z)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...


def rated_samples() -> tuple[Callable[..., Tensor], Tensor, Tensor]:
    """Return the map `f(z, rate, x) = tanh(rate z + x)`, and the rates and `x` of five samples.

    The map acts on each number alone, so that its rounding does not depend on the batch.
    """
    rates = torch.tensor([0.1, 0.9, 0.5, -0.7, 0.97], dtype=torch.float64)[:, None]
    x = torch.linspace(-1, 1, 30, dtype=torch.float64).view(5, 6)
    return lambda z, rate, x: torch.tanh(rate * z + x), rates, x


#: Tolerance of the graph problem, for the residual of the whole system in both passes.
GRAPH_TOL = 1e-6


def graph(
    nodes: int = 40, d: int = 8, degree: float = 4.0, gain: float = 0.95, seed: int = 0
) -> tuple[Callable[[Tensor, Tensor], Map], Tensor, Tensor, Tensor]:
    """Return the map `tanh(A z W + x)` over the nodes of a random graph, each row a node.

    `A` is symmetric and sparse, with loops, and normalised by degrees, so `|A| = 1`, and
    `|W| = gain`. With the defaults plain iteration needs some 25 evaluations for `GRAPH_TOL`.

    Returns:
        The map as a function of `W` and `x`, then `A`, `W` and `x`.
    """
    generator = torch.Generator().manual_seed(seed)
    edges = torch.rand(nodes, nodes, generator=generator, dtype=torch.float64) < degree / nodes
    A = edges.triu(1).double()
    A = A + A.mT + torch.eye(nodes, dtype=torch.float64)
    scale = A.sum(1).rsqrt()
    A = scale[:, None] * A * scale
    x = _normal(nodes, d, seed=seed + 7)
    return lambda W, x: lambda z: torch.tanh(A @ z @ W + x), A, contraction(gain, d, seed), x


def chain(
    rows: int = 12, d: int = 4, gain: float = 0.9, seed: int = 0
) -> tuple[Callable[[Tensor, Tensor], Map], Callable[[Tensor, Tensor], Tensor], Tensor, Tensor]:
    """Return the map of `z_i = tanh(W z_{i-1} + x_i)` from `z_{-1} = 0`, every step a row.

    Returns:
        The map of all rows at once and the sequence computed step by step, which is its fixed point
        exactly, both as functions of `W` and `x`; then `W` and `x`.
    """

    def at_once(W: Tensor, x: Tensor) -> Map:
        return lambda z: torch.tanh(torch.cat((torch.zeros_like(z[:1]), z[:-1])) @ W.mT + x)

    def step_by_step(W: Tensor, x: Tensor) -> Tensor:
        states, z = [], torch.zeros_like(x[0])
        for x_i in x:
            z = torch.tanh(W @ z + x_i)
            states.append(z)
        return torch.stack(states)

    return at_once, step_by_step, contraction(gain, d, seed), _normal(rows, d, seed=seed + 7)


def counted(f: Callable[..., object]) -> tuple[Callable[..., object], list[int]]:
    """Return `f` and a list to which each call appends its batch size."""
    calls: list[int] = []

    def wrapped(*z: Tensor) -> object:
        first = z[0]
        calls.append(first.shape[0] if isinstance(first, Tensor) and first.dim() else 1)
        return f(*z)

    return wrapped, calls


def _normal(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)
