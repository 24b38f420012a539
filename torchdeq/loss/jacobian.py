"""The Jacobian of `f` at a state: its Frobenius norm as a loss, and its spectral radius."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from torchdeq._torch import tree_leaves
from torchdeq.autocast import AutocastState
from torchdeq.checks import require_whole
from torchdeq.packed import PackedFn
from torchdeq.packing import Packing
from torchdeq.pytree import State

_TOLERANCE = 1e-6  # residual of a converged eigenpair, relative to its eigenvalue


def jac_reg(f0: State, z0: State, vecs: int = 1, create_graph: bool = True) -> Tensor:
    r"""Estimate the squared Frobenius norm of the Jacobian, as a regulariser (Bai et al., 2021).

    $$\ell = \frac{1}{|z_0|} \; \frac{1}{m} \sum_{i=1}^{m} \| v_i^\top J \|^2,
    \qquad v_i \sim N(0, I)$$

    where $|z_0|$ is the number of elements and $m$ is `vecs`; the expectation is
    $\|J\|_F^2 / |z_0|$. Beside a loss on the fixed point, regularise at a new leaf:

    ```python
    z = states[-1].detach().requires_grad_()
    loss = crit(states[-1], y) + weight * jac_reg(f(z), z)
    ```

    Without `detach`, the term is differentiated through the fixed point as well.

    Args:
        f0: `f(z0)` with its graph, which is retained.
        z0: the state: a tensor, or a tuple, list or dict of tensors, that require grad.
        vecs: the number of random vectors.
        create_graph: whether the result can be differentiated.
    """
    require_whole("vecs, the number of random vectors,", vecs)
    linear = _Linearisation(f0, z0)
    total = torch.zeros((), dtype=linear.dtype, device=linear.packing.device)
    for _ in range(int(vecs)):
        v = [torch.randn(z.shape, dtype=z.dtype, device=z.device) for z in linear.inputs]
        for product in linear.vjp(v, create_graph):
            total = total + product.to(linear.dtype).square().sum()
    return total / vecs / max(1, sum(z.numel() for z in linear.inputs))


class Eigenpair(NamedTuple):
    """The modulus of each sample's leading eigenvalue, `radius` (B,), and an eigenvector for it."""

    vector: State
    radius: Tensor


def power_method(f0: State, z0: State, n_iters: int = 100) -> Eigenpair:
    r"""Return the spectral radius of each sample's Jacobian $J = \partial f_0 / \partial z_0$.

    The name is historical; `spectral_radius` documents the method. The vector has the structure of
    `z0` and norm 1 per sample. It is an eigenvector of $J^\top$ (a left eigenvector of $J$), or the
    real part of one.

    Args:
        f0: `f(z0)` with its graph, which is retained.
        z0: the state: a tensor, or a tuple, list or dict of tensors, that require grad.
        n_iters: the maximum number of products with the Jacobian.
    """
    linear = _Linearisation(f0, z0)
    packing = linear.packing

    def vjp(v: Tensor) -> Tensor:
        return packing.join(linear.vjp(packing.split(v), create_graph=False))

    vector, radius = spectral_radius(vjp, packing.pack(z0), n_iters)
    return Eigenpair(packing.unpack(vector), radius)


@torch.no_grad()
def spectral_radius(
    vjp: Callable[[Tensor], Tensor], z: Tensor, n_iters: int = 100, *, basis: int = 40
) -> Eigenpair:
    r"""Return the largest modulus of an eigenvalue of each row's Jacobian, and its vector.

    Arnoldi's method needs products only. The eigenvalues of $H$ approximate those of $J^\top$,

    $$J^\top V_m = V_m H_m + h \, v_{m+1} e_m^\top,$$

    also for complex pairs and Jacobians that are not normal. A full basis is compressed to the
    leading invariant subspace of $H$ and grows again (Stewart, 2001). The iteration ends when the
    leading pair of every sample has converged, when the space is exhausted, or after `n_iters`
    products. With fewer products than `D` the result is an estimate: accurate if the largest
    eigenvalues are well separated from the others. An eigenvalue in a Jordan chain of length $k$
    has an error of $\epsilon^{1/k}$.

    Rows must not depend on each other: with batch normalisation in training mode, a single sample
    has no radius. A sample with a non-finite product has radius NaN. Memory: `basis + 1` states in
    single precision or better; `D + 1` if `D` is at most twice the basis.

    Args:
        vjp: the product with the transposed Jacobian, from (B, D) to (B, D).
        z: a (B, D) tensor with the dtype and device of the states; its values are not used.
        n_iters: the maximum number of products.
        basis: the number of basis vectors, at least 4.
    """
    require_whole("n_iters, the number of products,", n_iters)
    require_whole("basis, the number of basis vectors,", basis, 4)
    dim = max(1, z.shape[1])
    size = dim if dim <= 2 * basis else basis  # a basis of the whole space needs no restart
    krylov = _Krylov(vjp, z, min(size, n_iters))  # before autocast is suspended: `vjp` needs it
    with AutocastState(z.device).suspended():
        return krylov.leading_pair(n_iters)


class _Linearisation:
    """The graph from `z0` to `f0`, for products with the Jacobian."""

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
        """Return the products of `v` with the Jacobian, zero for inputs that `f` does not use."""
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
                "f0 does not depend on z0: pass the same tensor as z0 that f was called with"
            )
        pairs = zip(products, self.inputs, strict=True)
        return [torch.zeros_like(z) if p is None else p for p, z in pairs]


class _Ritz(NamedTuple):
    """The eigenvalues of H (B, j), largest first, their vectors (B, j, j), and H (B, j + 1, j)."""

    values: Tensor
    vectors: Tensor
    H: Tensor

    def converged(self) -> bool:
        """Return whether the leading pair of every sample has a small residual."""
        residual = self.H[:, -1, -1] * self.vectors[:, -1, 0].abs()
        return bool((residual <= _TOLERANCE * self.values[:, 0].abs()).all())


class _Krylov:
    """A batch of Krylov spaces with orthonormal bases `V` (slot, B, D).

    The basis of an exhausted space is extended by zero vectors: they add eigenvalues 0, which are
    never the largest. The small eigenproblems are solved on the CPU in double precision.
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

    def leading_pair(self, n_iters: int) -> Eigenpair:
        """Return the leading pairs, after at most `n_iters` products."""
        dim = max(1, self.V.shape[2])
        for k in range(1, n_iters + 1):
            self.grow()
            last = k == n_iters or self.j == dim
            if last or self.check_due:
                ritz = self.ritz()
                if last or ritz.converged():
                    break
                if self.full:
                    self.compress(ritz)
        radius = ritz.values[:, 0].abs().to(self.V.device, self.V.dtype)
        radius = torch.where(self.finite, radius, torch.nan)
        return Eigenpair(self._vector(ritz.vectors).to(self._dtype), radius)

    @property
    def full(self) -> bool:
        """Return whether the basis has no room for another vector."""
        return self.j == self.size

    @property
    def check_due(self) -> bool:
        """Return whether to compute eigenvalues now; they cost as much as several products."""
        return self.j in (8, 16, 40) or self.full

    def grow(self) -> None:
        """Add a basis vector: one product, orthogonalised twice."""
        j = self.j
        with self._autocast.restored():
            w = self._vjp(self.V[j].to(self._dtype)).to(self.V.dtype)
        before = torch.linalg.vector_norm(w, dim=1)
        self.finite &= before.isfinite()
        w = torch.where(self.finite[:, None], w, 0.0).unsqueeze(1)  # (B, 1, D)
        V = self.V[: j + 1].transpose(0, 1)  # (B, j + 1, D)
        for _ in range(2):
            c = torch.bmm(w, V.mT)
            w = torch.baddbmm(w, c, V, alpha=-1)
            self.H[:, : j + 1, j] += c.squeeze(1)
        length = torch.linalg.vector_norm(w, dim=2)  # (B, 1)
        # If only rounding is left, the space is exhausted.
        length = torch.where(length > 10 * self._eps * before[:, None], length, 0.0)
        self.H[:, j + 1, j] = length.squeeze(1)
        self.V[j + 1] = w.squeeze(1) / torch.where(length > 0, length, torch.inf)
        self.j = j + 1

    def ritz(self) -> _Ritz:
        """Return the eigenvalues and eigenvectors of H, largest eigenvalues first."""
        H = self.H[:, : self.j + 1, : self.j].to("cpu", torch.float64, copy=True)
        values, vectors = torch.linalg.eig(H[:, : self.j])
        # A stable sort keeps conjugate pairs together, the positive imaginary part first.
        order = values.abs().sort(dim=1, descending=True, stable=True).indices
        vectors = vectors.gather(2, order[:, None].expand_as(vectors))
        return _Ritz(values.gather(1, order), vectors, H)

    def compress(self, ritz: _Ritz) -> None:
        r"""Keep the leading invariant subspace: $J^\top (V Q) = (V Q) S + h v b^\top$, exactly."""
        values, vectors, H = ritz
        p = max(2, 3 * self.size // 10)
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
        subspace, vector = self._combine(Q), self._vector(vectors)
        self.V[p] = torch.where(sound[:, 0].to(self.V.device), self.V[self.size], vector)
        self.V[:p] = subspace.transpose(0, 1)
        self.H.zero_()
        self.H[:, :p, :p] = S.to(self.H)
        self.H[:, p, :p] = (H[:, -1, -1, None] * Q[:, -1]).to(self.H)
        self.j = p

    def _vector(self, vectors: Tensor) -> Tensor:
        """Return (B, D) the real part of the leading Ritz vector, normalised."""
        return normalize(self._combine(vectors[:, :, :1].real).squeeze(1), eps=self._eps)

    def _combine(self, Q: Tensor) -> Tensor:
        """Return (B, c, D) linear combinations of the basis, with coefficients (B, j, c)."""
        return torch.bmm(Q.mT.to(self.V.device, self.V.dtype), self.V[: self.j].transpose(0, 1))
