"""The Jacobian of `f` at a state: its Frobenius norm as a loss, and its spectral radius."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchdeq._torch import tree_leaves
from torchdeq.arnoldi import Krylov
from torchdeq.autocast import AutocastState
from torchdeq.checks import require_whole
from torchdeq.packed import PackedFn
from torchdeq.packing import Packing
from torchdeq.pytree import State


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
    vjp: Callable[[Tensor], Tensor],
    z: Tensor,
    n_iters: int = 100,
    *,
    basis: int = 40,
    any_process: Callable[[bool], bool] = bool,
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
        any_process: returns whether a flag is set in any process of a distributed program whose
            processes must make equally many products.
    """
    require_whole("n_iters, the number of products,", n_iters)
    require_whole("basis, the number of basis vectors,", basis, 4)
    dim = max(1, z.shape[1])
    size = dim if dim <= 2 * basis else basis  # a basis of the whole space needs no restart
    krylov = Krylov(vjp, z, min(size, n_iters))  # before autocast is suspended: `vjp` needs it
    with AutocastState(z.device).suspended():
        ritz = krylov.run(n_iters, any_process)
        radius = ritz.values[:, 0].abs().to(z.device, krylov.V.dtype)
        radius = torch.where(krylov.finite, radius, torch.nan)
        return Eigenpair(krylov.leading_vector(ritz).to(z.dtype), radius)


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
