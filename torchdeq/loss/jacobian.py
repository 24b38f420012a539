"""The Jacobian of ``f`` at a state: its size as a loss, its spectral radius as a measurement."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize
from torch.utils._pytree import tree_leaves

from torchdeq.autocast import AutocastState
from torchdeq.packed import PackedFn
from torchdeq.packing import Packing
from torchdeq.pytree import State

_FOUND = 1e-6  # residual of an eigenpair, relative to its eigenvalue, that needs no improvement


def jac_reg(f0: State, z0: State, vecs: int = 1, create_graph: bool = True) -> Tensor:
    r"""Jacobian regularisation (Bai et al., 2021): an estimate of the squared Frobenius norm.

    .. math:: \ell = \frac{1}{|z_0|} \; \frac{1}{m} \sum_{i=1}^{m} \| v_i^\top J \|^2,
              \qquad v_i \sim N(0, I)

    with :math:`|z_0|` the number of elements and :math:`m` = ``vecs``; the expectation is
    :math:`\|J\|_F^2 / |z_0|`. Beside a loss on the fixed point, regularise at a fresh leaf::

        z = states[-1].detach().requires_grad_()
        loss = crit(states[-1], y) + weight * jac_reg(f(z), z)

    Without ``detach`` the term is differentiated through the fixed point as well.

    Args:
        f0: ``f(z0)``, with its graph, which is retained.
        z0: the state, a tensor or a tuple, list or dict of tensors that require grad.
        vecs: random vectors.
        create_graph: whether the result can be differentiated.
    """
    if vecs != int(vecs) or vecs < 1:
        raise ValueError(f"vecs, the random vectors, must be a whole number >= 1, got {vecs}")
    at = _Linearisation(f0, z0)
    total = torch.zeros((), dtype=at.dtype, device=at.packing.device)
    for _ in range(int(vecs)):
        v = [torch.randn(z.shape, dtype=z.dtype, device=z.device) for z in at.inputs]
        for product in at.vjp(v, create_graph):
            total = total + product.to(at.dtype).square().sum()
    return total / vecs / max(1, sum(z.numel() for z in at.inputs))


class Eigenpair(NamedTuple):
    """The modulus (B,) of each sample's leading eigenvalue, with a vector for it."""

    vector: State
    radius: Tensor


def power_method(f0: State, z0: State, n_iters: int = 100) -> Eigenpair:
    r"""The spectral radius of each sample's Jacobian :math:`J = \partial f_0 / \partial z_0`.

    The name is historical: see :func:`spectral_radius` for the method. The vector, of norm 1 per
    sample, has the shape of ``z0`` and belongs to :math:`J^\top`: a left eigenvector, or the real
    part of one.

    Args:
        f0: ``f(z0)``, with its graph, which is retained.
        z0: the state, a tensor or a tuple, list or dict of tensors that require grad.
        n_iters: products with the Jacobian at most.
    """
    at = _Linearisation(f0, z0)
    packing = at.packing

    def vjp(v: Tensor) -> Tensor:
        return packing.join(at.vjp(packing.split(v), create_graph=False))

    vector, radius = spectral_radius(vjp, packing.pack(z0), n_iters)
    return Eigenpair(packing.unpack(vector), radius)


@torch.no_grad()
def spectral_radius(
    vjp: Callable[[Tensor], Tensor], z: Tensor, n_iters: int = 100, *, basis: int = 40
) -> Eigenpair:
    r"""The largest modulus of an eigenvalue, known only through products, row by row.

    Arnoldi's method: the eigenvalues of :math:`H` approximate those of :math:`J^\top`,

    .. math:: J^\top V_m = V_m H_m + h \, v_{m+1} e_m^\top,

    so complex pairs and Jacobians that are not normal are no obstacle. A full basis is compressed
    to the leading invariant subspace of :math:`H` and grows again (Stewart, 2001). It ends when
    every sample's leading pair is found, its space exhausted, or the budget spent. With fewer
    products than ``D`` the answer is an estimate, good where the largest eigenvalues stand out.
    An eigenvalue in a Jordan chain of length :math:`k` is known to :math:`\epsilon^{1/k}` only.

    Rows must not depend on each other: with batch normalisation in training there is no radius of
    a single sample. A sample with a non-finite product has radius NaN. Memory: ``basis + 1`` states
    in at least single precision, ``D + 1`` if ``D`` is at most twice the basis.

    Args:
        vjp: products with the transposed Jacobian, (B, D) to (B, D).
        z: a matrix of that shape, for its dtype and device; its values do not matter.
        n_iters: products at most.
        basis: vectors kept, at least 4.
    """
    if n_iters != int(n_iters) or n_iters < 1:
        raise ValueError(f"n_iters, the products, must be a whole number >= 1, got {n_iters}")
    if basis < 4:
        raise ValueError(f"basis, the vectors kept, must be at least 4, got {basis}")
    dim = max(1, z.shape[1])
    size = dim if dim <= 2 * basis else basis  # a basis of the whole space needs no restart
    krylov = _Krylov(vjp, z, min(size, n_iters))
    with AutocastState(z.device).suspended():
        for k in range(1, n_iters + 1):
            krylov.grow()
            over = k == n_iters or krylov.j == dim
            if over or krylov.due:
                ritz = krylov.ritz()
                if over or ritz.found():
                    break
                if krylov.full:
                    krylov.compress(ritz)
        return krylov.leading(ritz)


class _Linearisation:
    """The graph from ``z0`` to ``f0``, checked."""

    def __init__(self, f0: State, z0: State) -> None:
        self.packing = Packing(z0)
        self.inputs: list[Tensor] = tree_leaves(z0)
        self.dtype = torch.promote_types(self.packing.dtype, torch.float32)
        if not all(z.requires_grad for z in self.inputs):
            raise ValueError(
                "z0 does not require grad: make it z0.detach().requires_grad_() before f(z0)"
            )
        images = PackedFn(self.packing, lambda *_: f0).on_tensors(self.inputs)
        self._traced = [i for i, image in enumerate(images) if image.requires_grad]
        self._images = [images[i] for i in self._traced]
        if not self._images:
            raise ValueError("f0 has no graph: compute f0 = f(z0) with grad mode on")

    def vjp(self, v: list[Tensor], create_graph: bool) -> list[Tensor]:
        """The products of ``v`` with the Jacobian, zero for a part that ``f`` does not use."""
        v = [v[i] for i in self._traced]
        products = torch.autograd.grad(
            self._images,
            self.inputs,
            v,
            retain_graph=True,
            create_graph=create_graph,
            allow_unused=True,
        )
        if all(product is None for product in products):
            raise ValueError(
                "f0 does not depend on z0: z0 must be the very tensor that f was called with"
            )
        pairs = zip(products, self.inputs, strict=True)
        return [torch.zeros_like(z) if p is None else p for p, z in pairs]


class _Ritz(NamedTuple):
    """Eigenvalues of H (B, j), leading ones first, their vectors (B, j, j), and H (B, j + 1, j)."""

    values: Tensor
    vectors: Tensor
    H: Tensor

    def found(self) -> bool:
        """Whether every leading pair solves its eigenproblem."""
        residual = self.H[:, -1, -1] * self.vectors[:, -1, 0].abs()
        return bool((residual <= _FOUND * self.values[:, 0].abs()).all())


class _Krylov:
    """A batch of Krylov spaces with orthonormal bases ``V`` (slot, B, D).

    A space that is exhausted goes on with zero vectors: they add eigenvalues 0, which never lead.
    The small eigenproblems are solved on the CPU in double precision.
    """

    def __init__(self, vjp: Callable[[Tensor], Tensor], z: Tensor, size: int) -> None:
        self._vjp, self._dtype, self._autocast = vjp, z.dtype, AutocastState(z.device)
        dtype = torch.promote_types(z.dtype, torch.float32)
        self.size, self.j = size, 0
        self._eps = torch.finfo(dtype).eps
        self.V = z.new_empty(size + 1, *z.shape, dtype=dtype)
        self.V[0] = normalize(torch.randn(z.shape, dtype=dtype, device=z.device), eps=0.0)
        self.H = z.new_zeros(len(z), size + 1, size, dtype=dtype)
        self.finite = z.new_ones(len(z), dtype=torch.bool)

    @property
    def full(self) -> bool:
        return self.j == self.size

    @property
    def due(self) -> bool:
        """Whether to look: eigenvalues of a batch cost as much as several products."""
        return self.j in (8, 16, 40) or self.full

    def grow(self) -> None:
        """One product, orthogonalised twice."""
        j = self.j
        with self._autocast.restored():
            w = self._vjp(self.V[j].to(self._dtype)).to(self.V.dtype)
        reach = torch.linalg.vector_norm(w, dim=1)
        self.finite &= reach.isfinite()
        w = torch.where(self.finite[:, None], w, 0.0).unsqueeze(1)  # (B, 1, D)
        V = self.V[: j + 1].transpose(0, 1)  # (B, j + 1, D)
        for _ in range(2):
            c = torch.bmm(w, V.mT)
            w = torch.baddbmm(w, c, V, alpha=-1)
            self.H[:, : j + 1, j] += c.squeeze(1)
        length = torch.linalg.vector_norm(w, dim=2)  # (B, 1)
        # What is left may be rounding only: then the space is exhausted.
        length = torch.where(length > 10 * self._eps * reach[:, None], length, 0.0)
        self.H[:, j + 1, j] = length.squeeze(1)
        self.V[j + 1] = w.squeeze(1) / torch.where(length > 0, length, torch.inf)
        self.j = j + 1

    def ritz(self) -> _Ritz:
        H = self.H[:, : self.j + 1, : self.j].to("cpu", torch.float64, copy=True)
        values, vectors = torch.linalg.eig(H[:, : self.j])
        # A stable sort keeps conjugate pairs together, the positive imaginary part first.
        order = values.abs().sort(dim=1, descending=True, stable=True).indices
        vectors = vectors.gather(2, order[:, None].expand_as(vectors))
        return _Ritz(values.gather(1, order), vectors, H)

    def compress(self, ritz: _Ritz) -> None:
        """Keep the leading invariant subspace: ``J^T (V Q) = (V Q) S + h v b^T``, exactly."""
        values, vectors, H = ritz
        p = max(2, 3 * self.size // 10)
        lead = values[:, None, :p]
        span = torch.where(lead.imag < 0, vectors[:, :, :p].imag, vectors[:, :, :p].real)
        Q = torch.linalg.qr(span).Q  # (B, size, p)
        Q[:, :, -1:] = torch.where(lead[:, :, -1:].imag > 0, 0.0, Q[:, :, -1:])  # half a pair
        S = Q.mT @ H[:, :-1] @ Q
        # Eigenvectors that (nearly) coincide do not span the subspace; start from the leading one.
        drift = torch.linalg.matrix_norm(H[:, :-1] @ Q - Q @ S)
        sound = (drift <= 1e-8 * torch.linalg.matrix_norm(H[:, :-1]))[:, None, None]
        Q, S = torch.where(sound, Q, 0.0), torch.where(sound, S, 0.0)
        kept, vector = self._combine(Q), self._vector(vectors)
        self.V[p] = torch.where(sound[:, 0].to(self.V.device), self.V[self.size], vector)
        self.V[:p] = kept.transpose(0, 1)
        self.H.zero_()
        self.H[:, :p, :p] = S.to(self.H)
        self.H[:, p, :p] = (H[:, -1, -1, None] * Q[:, -1]).to(self.H)
        self.j = p

    def leading(self, ritz: _Ritz) -> Eigenpair:
        radius = ritz.values[:, 0].abs().to(self.V.device, self.V.dtype)
        vector = self._vector(ritz.vectors)
        radius = torch.where(self.finite, radius, torch.nan)
        return Eigenpair(vector.to(self._dtype), radius)

    def _vector(self, vectors: Tensor) -> Tensor:
        """(B, D) the real part of the leading Ritz vector, of norm 1."""
        return normalize(self._combine(vectors[:, :, :1].real).squeeze(1), eps=self._eps)

    def _combine(self, Q: Tensor) -> Tensor:
        """(B, c, D) combinations of the basis with coefficients (B, j, c)."""
        return torch.bmm(Q.mT.to(self.V.device, self.V.dtype), self.V[: self.j].transpose(0, 1))
