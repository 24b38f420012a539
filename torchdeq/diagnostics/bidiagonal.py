"""Golub and Kahan's method: extreme singular values of a batch of matrices, from products alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from torchdeq.arnoldi import random_orthogonal
from torchdeq.numbers import row_norm

Product = Callable[[Tensor], Tensor]  # (B, D) -> (B, D), linear, row by row

_TOLERANCE = 1e-4  # residual of a settled singular triplet, relative to the largest value
_CHECKS = (6, 12, 24, 48, 96)  # steps after which convergence is tested


class Triplets(NamedTuple):
    """Singular values (B, c), right and left vectors (B, c, D), and whether each has settled."""

    values: Tensor
    right: Tensor
    left: Tensor
    converged: Tensor


class Bidiagonal:
    r"""Orthonormal bases with $A V = U R$ and $A^\top U = V R^\top + \beta v e^\top$.

    $R$ is upper bidiagonal up to rounding; all of its upper triangle is kept, so that bases are
    orthogonal to working precision and singular values near zero keep their digits. A space that is
    exhausted continues with a random vector, which finds multiple singular values.

    Args:
        product: the product with $A$, from (B, D) to (B, D).
        transposed: the product with $A^\top$.
        z: a (B, D) tensor with the dtype and device of the vectors; its values are not used.
        size: the largest number of steps, of two products each.
    """

    def __init__(self, product: Product, transposed: Product, z: Tensor, size: int) -> None:
        self._product, self._transposed, self._dtype = product, transposed, z.dtype
        dtype = torch.promote_types(z.dtype, torch.float32)
        self.size, self.j, self.products = max(1, min(size, z.shape[1])), 0, 0
        self._eps = torch.finfo(dtype).eps
        self.V = z.new_empty(self.size + 1, *z.shape, dtype=dtype)
        self.U = z.new_empty(self.size, *z.shape, dtype=dtype)
        self.R = z.new_zeros(len(z), self.size, self.size, dtype=dtype)
        self.beta = z.new_zeros(len(z), dtype=dtype)  # the coupling to the vector not yet used
        self.V[0] = normalize(torch.randn(z.shape, dtype=dtype, device=z.device), eps=0.0)

    def run(self, count: int, largest: bool) -> None:
        """Take steps until the wanted triplets have settled or the size is reached."""
        while self.j < self.size:
            self.step()
            due = self.j in _CHECKS and self.j > count
            if due and bool(self.triplets(count, largest).converged.all()):
                return

    def step(self) -> None:
        """Add one vector to each basis: two products, both orthogonalised twice."""
        j, dim = self.j, self.V.shape[2]
        w = self._product(self.V[j].to(self._dtype)).to(self.V.dtype)
        w, length, coefficients = _orthogonalised(w, self.U[:j], self._eps)
        self.R[:, :j, j] = coefficients
        self.R[:, j, j] = length
        self.U[j] = torch.where(length[:, None] > 0, w, random_orthogonal(self.U[:j]))
        t = self._transposed(self.U[j].to(self._dtype)).to(self.V.dtype)
        t, self.beta, _ = _orthogonalised(t, self.V[: j + 1], self._eps)
        if j + 1 < dim:
            self.V[j + 1] = torch.where(
                self.beta[:, None] > 0, t, random_orthogonal(self.V[: j + 1])
            )
        else:
            self.beta = torch.zeros_like(self.beta)  # the basis spans the whole space
        self.products += 2
        self.j = j + 1

    def triplets(self, count: int, largest: bool) -> Triplets:
        """Return the extreme triplets, the most extreme first."""
        R = self.R[:, : self.j, : self.j].to("cpu", torch.float64)
        good = R.isfinite().flatten(1).all(1)
        P, S, Qt = torch.linalg.svd(torch.where(good[:, None, None], R, 0.0))
        order = torch.arange(self.j) if largest else torch.arange(self.j - 1, -1, -1)
        order = order[:count]
        values, P, Q = S[:, order], P[:, :, order], Qt.mT[:, :, order]
        residual = self.beta.cpu().double()[:, None] * P[:, -1].abs()
        converged = (residual <= _TOLERANCE * S[:, :1]) & good[:, None]
        values = torch.where(good[:, None], values, torch.nan)
        basis = slice(0, self.j)
        right, left = self._combine(self.V[basis], Q), self._combine(self.U[basis], P)
        return Triplets(values.to(self.V.device, self.V.dtype), right, left, converged)

    def _combine(self, basis: Tensor, Q: Tensor) -> Tensor:
        """Return (B, c, D) linear combinations of a basis, with coefficients (B, j, c)."""
        return torch.bmm(Q.mT.to(self.V.device, self.V.dtype), basis.transpose(0, 1))


def _orthogonalised(w: Tensor, basis: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return (B, D) unit vectors orthogonal to the basis, their lengths, and the coefficients.

    A length of mere rounding is zero; its vector is zero, too.
    """
    before = row_norm(w)
    V = basis.transpose(0, 1)  # (B, j, D)
    w = w.unsqueeze(1)
    total = w.new_zeros(len(w), len(basis))
    for _ in range(2):
        c = torch.bmm(w, V.mT)
        w = torch.baddbmm(w, c, V, alpha=-1)
        total += c.squeeze(1)
    w = w.squeeze(1)
    length = row_norm(w)
    length = torch.where(length > 10 * eps * before, length, 0.0)
    return w / torch.where(length > 0, length, torch.inf)[:, None], length, total
