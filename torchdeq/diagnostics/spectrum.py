"""The spectrum of the Jacobian at a state: eigenvalues, singular directions, non-normality."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchdeq.arnoldi import Krylov
from torchdeq.autocast import AutocastState
from torchdeq.checks import require_whole
from torchdeq.diagnostics.bidiagonal import Bidiagonal
from torchdeq.diagnostics.guarding import leaving_modules
from torchdeq.diagnostics.linearisation import Linearisation
from torchdeq.pytree import State
from torchdeq.randomness import Randomness

_BASIS = 40  # basis vectors of Arnoldi's method between two restarts
_ACCURATE = 1e-4  # error of an accurate eigenvalue, relative to the largest modulus
_POWERS = 20  # powers of the Jacobian that transient growth is measured over


@dataclass(frozen=True)
class Spectrum:
    """The leading eigenvalues of each sample's Jacobian; one row for a coupled system.

    Args:
        values: (B, count) complex numbers on the CPU, largest modulus first.
        converged: (B, count) whether each value is accurate to 1e-4 of the largest modulus, by its
            residual and by what rounding in `f` does to an eigenvalue of its condition. Without, it
            is an estimate; eigenvalues of defective and very non-normal Jacobians stay estimates.
        products: products with the transposed Jacobian that were spent.
    """

    values: Tensor
    converged: Tensor
    products: int

    @property
    def radius(self) -> Tensor:
        """Return (B,) the spectral radius: below 1, plain iteration converges near the state."""
        return self.values[:, 0].abs()


@dataclass(frozen=True)
class SingularDirections:
    r"""The smallest singular values of $I - J$ and their directions.

    Along the right direction of a singular value 0, `f` moves a state as far as the state itself
    moved: a shift direction, along which nothing fixes the state. A small value also amplifies
    gradients: $|(I - J)^{-1}|$ is its inverse.

    Args:
        values: (B, count), smallest first. Each is an upper bound, up to rounding errors of `f`
            relative to the largest singular value.
        right: (B, count, D) unit vectors $v$ with $(I - J) v = \sigma u$, in rows of the packed
            state.
        left: (B, count, D) the unit vectors $u$.
        converged: (B, count) whether the value has settled.
        products: products with $J$ and its transpose that were spent.
    """

    values: Tensor
    right: Tensor
    left: Tensor
    converged: Tensor
    products: int


@dataclass(frozen=True)
class NonNormality:
    r"""How far iterates can grow before they shrink.

    Args:
        radius: (B,) the spectral radius of $J$: growth in the long run.
        norm: (B,) the largest singular value of $J$: growth in one step.
        growth: (B,) the largest of $|J^k v|$ over 20 powers, for the unit vector $v$ that grows
            most in the first step.
    """

    radius: Tensor
    norm: Tensor
    growth: Tensor

    @property
    def ratio(self) -> Tensor:
        """Return (B,) norm over radius: 1 for a normal Jacobian."""
        return self.norm / self.radius.clamp_min(torch.finfo(self.radius.dtype).tiny)


@leaving_modules
def eigenvalues(
    f: Callable[..., Any],
    z: State,
    args: tuple[Any, ...] = (),
    *,
    count: int = 6,
    coupled: bool = False,
    max_products: int = 200,
) -> Spectrum:
    r"""Compute the leading eigenvalues of the Jacobian of `f` at `z`, by Arnoldi's method.

    For samples of at most 80 numbers (a coupled system: in all) and enough products, all
    eigenvalues are exact up to rounding, with their multiplicities; an eigenvalue in a Jordan chain
    of length $k$ has an error of $\epsilon^{1/k}$. Of larger samples, eigenvalues are found if they
    are separated from the others, and copies of a multiple one may be missed. Memory: 41 states, or
    81. Modules inside `f` are left as they were.

    Args:
        f: called as `f(z, *args)`, or `f(*z, *args)` for a tuple or list state.
        z: the state, usually a fixed point.
        args: further arguments of `f`.
        count: the number of eigenvalues; at most as many as a sample has numbers.
        coupled: treat the batch as one system, e.g. the nodes of a graph.
        max_products: the largest number of products with the transposed Jacobian.
    """
    linear = Linearisation(f, z, args, coupled)
    return eigenvalues_of(linear, count=count, max_products=max_products)


@torch.no_grad()
def eigenvalues_of(linear: Linearisation, *, count: int = 6, max_products: int = 200) -> Spectrum:
    """Compute the leading eigenvalues of a linearised map; see `eigenvalues`."""
    require_whole("count, the number of eigenvalues,", count)
    require_whole("max_products", max_products)
    rows = linear.z
    dim = rows.shape[1]
    if not dim:
        raise ValueError("a state without numbers has no eigenvalues")
    count = min(count, dim)
    basis = max(_BASIS, 2 * count + 4)
    size = min(dim if dim <= 2 * basis else basis, max_products)
    with Randomness(rows.device).replayed(), AutocastState(rows.device).suspended():
        krylov = Krylov(linear.vjp, rows, size, count, refill=True)
        ritz = krylov.run(max_products)
    values, finite = ritz.values[:, :count], krylov.finite.cpu()[:, None]
    eps = max(torch.finfo(rows.dtype).eps, linear.f.eps)
    error = ritz.error(values.shape[1], eps, krylov.exhausted)
    settled = ritz.converged(count) | krylov.exhausted
    converged = finite & settled & (error <= _ACCURATE * values[:, :1].abs())
    values = torch.where(finite, values, torch.nan)
    return Spectrum(values, converged, krylov.products)


@leaving_modules
def singular_directions(
    f: Callable[..., Any],
    z: State,
    args: tuple[Any, ...] = (),
    *,
    count: int = 1,
    coupled: bool = False,
    max_products: int = 120,
) -> SingularDirections:
    r"""Compute the smallest singular values of $I - J$ at `z`, with their directions.

    Golub and Kahan's bidiagonalisation with complete orthogonalisation: exact up to rounding once
    the products are twice the size of a sample, and before that an upper bound, which settles
    quickly if the value is separated from the others. Memory: one state per product.

    Args:
        f: called as `f(z, *args)`, or `f(*z, *args)` for a tuple or list state.
        z: the state, usually a fixed point.
        args: further arguments of `f`.
        count: the number of directions; at most as many as a sample has numbers.
        coupled: treat the batch as one system.
        max_products: the largest number of products with $J$ and its transpose together.
    """
    linear = Linearisation(f, z, args, coupled)
    return singular_directions_of(linear, count=count, max_products=max_products)


@torch.no_grad()
def singular_directions_of(
    linear: Linearisation, *, count: int = 1, max_products: int = 120
) -> SingularDirections:
    """Compute the smallest singular values of a linearised map; see `singular_directions`."""
    require_whole("count, the number of directions,", count)
    require_whole("max_products", max_products, 2)
    rows = linear.z
    if not rows.shape[1]:
        raise ValueError("a state without numbers has no directions")
    with Randomness(rows.device).replayed(), AutocastState(rows.device).suspended():
        space = Bidiagonal(
            lambda v: v - linear.jvp(v), lambda u: u - linear.vjp(u), rows, max_products // 2
        )
        space.run(min(count, rows.shape[1]), largest=False)
        values, right, left, converged = space.triplets(min(count, space.j), largest=False)
    return SingularDirections(values, right, left, converged, space.products)


@leaving_modules
def non_normality(
    f: Callable[..., Any],
    z: State,
    args: tuple[Any, ...] = (),
    *,
    coupled: bool = False,
    max_products: int = 120,
) -> NonNormality:
    """Measure how much further than its eigenvalues say the Jacobian at `z` can stretch a state.

    Args:
        f: called as `f(z, *args)`, or `f(*z, *args)` for a tuple or list state.
        z: the state, usually a fixed point.
        args: further arguments of `f`.
        coupled: treat the batch as one system.
        max_products: the largest number of products, for the norm and again for the radius.
    """
    linear = Linearisation(f, z, args, coupled)
    radius = eigenvalues_of(linear, count=1, max_products=max_products).radius
    return non_normality_of(linear, radius, max_products=max_products)


@torch.no_grad()
def non_normality_of(
    linear: Linearisation, radius: Tensor, *, max_products: int = 120
) -> NonNormality:
    """Measure the non-normality of a linearised map whose spectral radius is known."""
    rows = linear.z
    with Randomness(rows.device).replayed(), AutocastState(rows.device).suspended():
        space = Bidiagonal(linear.jvp, linear.vjp, rows, max(1, max_products // 2))
        space.run(1, largest=True)
        values, right, _, _ = space.triplets(1, largest=True)
        v, growth = right[:, 0], values[:, 0].clone()
        for _ in range(min(_POWERS, max_products)):
            v = linear.jvp(v.to(rows.dtype)).to(growth.dtype)
            growth = torch.maximum(growth, torch.linalg.vector_norm(v, dim=1))
    return NonNormality(radius, values[:, 0].cpu().double(), growth.cpu().double())
