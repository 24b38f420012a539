"""Products with the Jacobian of a map at a state, in both directions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchdeq.grad.base import NoGraph
from torchdeq.numbers import row_norm
from torchdeq.packed import PackedFn
from torchdeq.packing import Packing
from torchdeq.pytree import State


class Linearisation:
    r"""The Jacobian $J = \partial f / \partial z$ at a state, for products from both sides.

    Vectors are rows of the packed state, (B, D), one Jacobian per sample; of a coupled map,
    (1, B D), one Jacobian for the batch. One call of `f` with a graph serves all products with
    $J^\top$, and products with $J$ by the derivative of $u \mapsto J^\top u$; where `f` cannot be
    differentiated twice, by forward mode, which calls `f` again. Fused kernels of attention allow
    neither, so attention runs as plain operations here.

    A product raises `NoGraph` if `f` changes with the state and its graph does not say how: the
    Jacobian is unknown then, and not zero.

    Args:
        f: called as `f(z, *args)`, or `f(*z, *args)` for a tuple or list state.
        z: the state.
        args: further arguments of `f`.
        coupled: treat the batch as one system.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        z: State,
        args: tuple[Any, ...] = (),
        coupled: bool = False,
    ) -> None:
        packing = Packing(z)
        packed = PackedFn(packing, f, args)
        self.f = packed.as_one_system() if coupled else packed
        self.z = self.f.packing.pack(z).detach().clone()  # (B, D), or (1, B D); f may write to it
        self._graph: tuple[Tensor, Tensor] | None = None
        self._tangent: tuple[Tensor, Tensor] | None = None
        self._forward_mode = self._is_constant = False

    @property
    def image(self) -> Tensor:
        """Return `f(z)`, without its graph."""
        return self._attached()[0].detach()

    def vjp(self, u: Tensor) -> Tensor:
        r"""Return $J^\top u$, row by row."""
        fz, h = self._attached()
        product = None
        if fz.requires_grad:
            (product,) = torch.autograd.grad(fz, h, u, retain_graph=True, allow_unused=True)
        return self._zero(u) if product is None else product

    def jvp(self, v: Tensor) -> Tensor:
        r"""Return $J v$, row by row; raise `RuntimeError` if `f` cannot be differentiated so."""
        if not self._forward_mode:
            try:
                return self._double_vjp(v)
            except NoGraph:
                raise
            except RuntimeError:
                self._forward_mode = True
        with torch.no_grad(), _plain_attention():
            return self.f.jvp(self.z, v)

    def _attached(self) -> tuple[Tensor, Tensor]:
        """Return `f(h)` with its graph, and the leaf `h`."""
        if self._graph is None:
            if torch.is_inference_mode_enabled():
                raise RuntimeError("f must be differentiated: call this outside inference_mode")
            h = self.z.clone().requires_grad_()
            with torch.enable_grad(), _plain_attention():
                self._graph = self.f(h), h
        return self._graph

    def _double_vjp(self, v: Tensor) -> Tensor:
        r"""Return $J v$ as the derivative of $u \mapsto J^\top u$."""
        fz, h = self._attached()
        if self._tangent is None:
            w, u = None, torch.zeros_like(fz).requires_grad_()
            if fz.requires_grad:
                with torch.enable_grad():
                    (w,) = torch.autograd.grad(fz, h, u, create_graph=True, allow_unused=True)
            self._tangent = self._zero(u) if w is None else w, u
        w, u = self._tangent
        if not w.requires_grad:
            return torch.zeros_like(v)
        (product,) = torch.autograd.grad(w, u, v, retain_graph=True, allow_unused=True)
        return torch.zeros_like(v) if product is None else product

    @torch.no_grad()
    def _zero(self, v: Tensor) -> Tensor:
        """Return the product of an `f` without a graph, or raise if `f` is not constant."""
        if not self._is_constant:
            size = row_norm(self.z)[:, None].clamp_min(1.0).to(self.z.dtype)
            noise = torch.linspace(-1.0, 1.0, self.z.shape[1], device=self.z.device)
            moved = self.f(self.z + size * noise.to(self.z.dtype).cos())
            same = (moved == self.image) | (moved.isnan() & self.image.isnan())
            if not bool(same.all()):
                raise NoGraph()
            self._is_constant = True
        return torch.zeros_like(v)


def _plain_attention() -> Any:
    """Return a block in which attention runs as plain operations, which differentiate twice."""
    return sdpa_kernel(SDPBackend.MATH)
