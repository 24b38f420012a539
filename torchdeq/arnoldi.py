"""Arnoldi's method: the leading eigenvalues of a batch of matrices from products alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from torchdeq.autocast import AutocastState
from torchdeq.numbers import row_norm

Product = Callable[[Tensor], Tensor]  # (B, D) -> (B, D), linear, row by row

_TOLERANCE = 1e-6  # residual of a converged eigenpair, relative to its eigenvalue


class Ritz(NamedTuple):
    """The eigenvalues of H (B, j), largest first, their vectors (B, j, j), and H (B, j + 1, j)."""

    values: Tensor
    vectors: Tensor
    H: Tensor

    def converged(self, count: int = 1) -> Tensor:
        """Return (B, count) whether each of the leading pairs has a small residual."""
        residual = self.H[:, -1, -1, None] * self.vectors[:, -1, :count].abs()
        return residual <= _TOLERANCE * self.values[:, :count].abs()

    def error(self, count: int, eps: float, exhausted: bool) -> Tensor:
        r"""Return (B, count) an estimate of the error of each leading value, to first order.

        It is $(r + \epsilon |H|) / |y^* x|$ with the residual $r$ of the pair and its unit vectors
        $x$ and $y$ from the right and from the left: of a defective eigenvalue, infinite.

        Args:
            count: of leading values.
            eps: machine epsilon of the products.
            exhausted: whether the basis spans the whole space, so that nothing remains.
        """
        inverse, info = torch.linalg.inv_ex(self.vectors)  # rows: left vectors over y^* x
        condition = torch.linalg.vector_norm(inverse, dim=2)[:, :count]
        condition = torch.where(
            (info == 0)[:, None], condition.nan_to_num(nan=torch.inf), torch.inf
        )
        residual = self.H[:, -1, -1, None] * self.vectors[:, -1, :count].abs()
        size = torch.linalg.matrix_norm(self.H)[:, None]
        error = eps * size if exhausted else residual + eps * size
        return torch.where(error > 0, condition * error, 0.0)


class Krylov:
    r"""A batch of Krylov spaces with orthonormal bases `V` (slot, B, D).

    $$A V_m = V_m H_m + h \, v_{m+1} e_m^\top$$

    The eigenvalues of $H$ approximate those of $A$, also for complex pairs and matrices that are
    not normal; all vectors are real. A full basis is compressed to the leading invariant subspace
    of $H$ and grows again (Stewart, 2001). The small eigenproblems are solved on the CPU in double
    precision.

    The basis of an exhausted space is extended by zero vectors, which add eigenvalues 0 and never
    the largest one; or, with `refill`, by random vectors, which also find the further copies of a
    multiple eigenvalue.

    Args:
        product: the product with the matrix of each row, from (B, D) to (B, D).
        z: a (B, D) tensor with the dtype and device of the vectors; its values are not used.
        size: the number of basis vectors.
        count: the number of leading eigenvalues that are wanted.
        refill: continue an exhausted space with a random vector.
    """

    def __init__(
        self, product: Product, z: Tensor, size: int, count: int = 1, refill: bool = False
    ) -> None:
        self._product, self._dtype, self._autocast = product, z.dtype, AutocastState(z.device)
        dtype = torch.promote_types(z.dtype, torch.float32)
        self.size, self.count, self.j, self.products = size, count, 0, 0
        self._refill = refill
        self._eps = torch.finfo(dtype).eps
        self.V = z.new_empty(size + 1, *z.shape, dtype=dtype)
        self.V[0] = normalize(torch.randn(z.shape, dtype=dtype, device=z.device), eps=0.0)
        self.H = z.new_zeros(len(z), size + 1, size, dtype=dtype)
        self.finite = z.new_ones(len(z), dtype=torch.bool)

    def run(self, n_iters: int, any_process: Callable[[bool], bool] = bool) -> Ritz:
        """Return the leading pairs, after at most `n_iters` products.

        Args:
            n_iters: products, at most.
            any_process: returns whether a flag is set in any process that must make as many
                products.
        """
        dim = max(1, self.V.shape[2])
        while True:
            self.grow()
            last = self.products == n_iters or self.j == dim
            if last or self.check_due:
                ritz = self.ritz()
                if last or not any_process(not bool(ritz.converged(self.count).all())):
                    return ritz
                if self.full:
                    self.compress(ritz)

    @property
    def exhausted(self) -> bool:
        """Return whether the basis spans the whole space, so that all eigenvalues are exact."""
        return self.j >= self.V.shape[2]

    @property
    def full(self) -> bool:
        """Return whether the basis has no room for another vector."""
        return self.j == self.size

    @property
    def check_due(self) -> bool:
        """Return whether to compute eigenvalues now; they cost as much as several products."""
        return (self.j in (8, 16, 40) and self.j > self.count) or self.full

    def grow(self) -> None:
        """Add a basis vector: one product, orthogonalised twice."""
        j = self.j
        with self._autocast.restored():
            w = self._product(self.V[j].to(self._dtype)).to(self.V.dtype)
        self.products += 1
        before = row_norm(w)
        self.finite &= before.isfinite()
        w = torch.where(self.finite[:, None], w, 0.0).unsqueeze(1)  # (B, 1, D)
        V = self.V[: j + 1].transpose(0, 1)  # (B, j + 1, D)
        for _ in range(2):
            c = torch.bmm(w, V.mT)
            w = torch.baddbmm(w, c, V, alpha=-1)
            self.H[:, : j + 1, j] += c.squeeze(1)
        length = row_norm(w)  # (B, 1)
        # If only rounding is left, the space is exhausted.
        length = torch.where(length > 10 * self._eps * before[:, None], length, 0.0)
        self.H[:, j + 1, j] = length.squeeze(1)
        self.V[j + 1] = w.squeeze(1) / torch.where(length > 0, length, torch.inf)
        if self._refill and j + 1 < self.V.shape[2]:
            fresh = random_orthogonal(self.V[: j + 1])
            self.V[j + 1] = torch.where(length > 0, self.V[j + 1], fresh)
        self.j = j + 1

    def ritz(self) -> Ritz:
        """Return the eigenvalues and eigenvectors of H, largest eigenvalues first."""
        H = self.H[:, : self.j + 1, : self.j].to("cpu", torch.float64, copy=True)
        values, vectors = torch.linalg.eig(H[:, : self.j])
        # A stable sort keeps conjugate pairs together, the positive imaginary part first.
        order = values.abs().sort(dim=1, descending=True, stable=True).indices
        vectors = vectors.gather(2, order[:, None].expand_as(vectors))
        return Ritz(values.gather(1, order), vectors, H)

    def compress(self, ritz: Ritz) -> None:
        r"""Keep the leading invariant subspace: $A (V Q) = (V Q) S + h v b^\top$, exactly."""
        values, vectors, H = ritz
        p = min(self.size - 1, max(2, 3 * self.size // 10, self.count + 2))
        lead = values[:, None, :p]
        span = torch.where(lead.imag < 0, vectors[:, :, :p].imag, vectors[:, :, :p].real)
        Q = torch.linalg.qr(span).Q  # (B, size, p)
        half = lead[:, :, -1:].imag > 0  # the last vector is one half of a conjugate pair
        Q[:, :, -1:] = torch.where(half, 0.0, Q[:, :, -1:])
        S = Q.mT @ H[:, :-1] @ Q
        # Eigenvectors that (nearly) coincide do not span the subspace: restart from the first.
        drift = torch.linalg.matrix_norm(H[:, :-1] @ Q - Q @ S)
        sound = (drift <= 1e-8 * torch.linalg.matrix_norm(H[:, :-1]))[:, None, None]
        Q, S = torch.where(sound, Q, 0.0), torch.where(sound, S, 0.0)
        subspace, vector = self._combine(Q), self.leading_vector(ritz)
        self.V[p] = torch.where(sound[:, 0].to(self.V.device), self.V[self.size], vector)
        self.V[:p] = subspace.transpose(0, 1)
        self.H.zero_()
        self.H[:, :p, :p] = S.to(self.H)
        self.H[:, p, :p] = (H[:, -1, -1, None] * Q[:, -1]).to(self.H)
        self.j = p

    def leading_vector(self, ritz: Ritz) -> Tensor:
        """Return (B, D) the real part of the leading Ritz vector, normalised."""
        return normalize(self._combine(ritz.vectors[:, :, :1].real).squeeze(1), eps=self._eps)

    def _combine(self, Q: Tensor) -> Tensor:
        """Return (B, c, D) linear combinations of the basis, with coefficients (B, j, c)."""
        return torch.bmm(Q.mT.to(self.V.device, self.V.dtype), self.V[: self.j].transpose(0, 1))


def random_orthogonal(V: Tensor) -> Tensor:
    """Return (B, D) random unit vectors orthogonal to the orthonormal basis (slot, B, D)."""
    basis = V.transpose(0, 1)  # (B, slot, D)
    w = normalize(torch.randn(V.shape[1:], dtype=V.dtype, device=V.device), eps=0.0)[:, None]
    for _ in range(3):  # the random vector may lie almost inside the space
        w = torch.baddbmm(w, torch.bmm(w, basis.mT), basis, alpha=-1)
        w = normalize(w, dim=2)
    return w.squeeze(1)
