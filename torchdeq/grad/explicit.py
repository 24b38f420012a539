"""Implicit differentiation with explicit inputs: exact at every order, in both modes.

A fixed point ``z = F(z, *c)`` is a Function of ``c`` whose derivative is another fixed point of the
same kind, that of the adjoint or tangent system. Differentiating it again is the same Function once
more, so nothing special happens at higher orders.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch._C import _functorch

from torchdeq.grad.closure import transforms_active

Map = Callable[[Tensor], Tensor]
Solve = Callable[[Map, Tensor], Tensor]  # (f, start) -> fixed point, on plain tensors (..., D)


class Operator(Protocol):
    """``F(z, *c)`` with a way to find its fixed point, and those of its derivatives."""

    @property
    def solve(self) -> Solve: ...

    @property
    def solve_affine(self) -> Solve:
        """For ``f(v) = A v + start``."""

    def make(self, *c: Tensor) -> Map: ...

    def __call__(self, z: Tensor, *c: Tensor) -> Tensor: ...


def root(F: Operator, z0: Tensor, *c: Tensor) -> Tensor:
    """The fixed point of ``F(., *c)``, differentiable in ``c``."""
    if not torch.is_grad_enabled() and not transforms_active():
        return F.solve(F.make(*c), z0)
    z: Tensor = _Root.apply(F, z0, *c)  # type: ignore[no-untyped-call]
    return z


def _vjp(f: Callable[..., Any], *inputs: Tensor) -> Callable[[Any], tuple[Tensor, ...]]:
    """Products of cotangents with the Jacobian of ``f``."""
    vjp: Callable[[Any], tuple[Tensor, ...]] = torch.func.vjp(f, *inputs)[1]
    return vjp


class _Adjoint:
    r"""``v -> J^T v + g`` with inputs ``(g, z, *c)``."""

    def __init__(self, F: Operator) -> None:
        self.F = F
        self.solve = self.solve_affine = F.solve_affine

    def make(self, *inputs: Tensor) -> Map:
        g, z, *c = inputs
        vjp = _vjp(self.F.make(*c), z)
        return lambda v: vjp(v)[0] + g

    def __call__(self, z: Tensor, *c: Tensor) -> Tensor:
        return self.make(*c)(z)


class _Tangent(_Adjoint):
    """``u -> J u + t`` with inputs ``(t, z, *c)``.

    J u is the adjoint of v -> J^T v: forward mode would be nested inside the level at work.
    """

    def make(self, *inputs: Tensor) -> Map:
        t, z, *c = inputs
        vjp = _vjp(self.F.make(*c), z)
        jvp = _vjp(lambda v: vjp(v)[0], torch.zeros_like(z))
        return lambda u: jvp(u)[0] + t


class _Batched:
    """The operator under ``vmap``: the solver sees one more batch dimension, and plain tensors."""

    def __init__(self, F: Operator, dims: tuple[int | None, ...], randomness: str) -> None:
        self.F, self.dims, self.randomness = F, dims, randomness
        self.solve, self.solve_affine = F.solve, F.solve_affine

    def make(self, *c: Tensor) -> Map:
        return lambda z: self(z, *c)

    def __call__(self, z: Tensor, *c: Tensor) -> Tensor:
        over = torch.func.vmap(self.F, (0, *self.dims), randomness=self.randomness)
        out: Tensor = over(z, *c)
        return out


class _Root(torch.autograd.Function):
    @staticmethod
    def forward(F: Operator, z0: Tensor, *c: Tensor) -> Tensor:
        with forward_ad._set_fwd_grad_enabled(False):
            return F.solve(F.make(*c), z0).clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.F, _, *c = inputs
        ctx.save_for_backward(output, *c)
        ctx.save_for_forward(output, *c)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        z, *c = ctx.saved_tensors  # z is the saved output, hence attached: the recursion is exact
        F: Operator = ctx.F
        u = root(_Adjoint(F), g, g, z, *c)
        needed = [i for i in range(len(c)) if ctx.needs_input_grad[2 + i]]

        def of_needed(*chosen: Tensor) -> Tensor:
            inputs = list(c)
            for i, t in zip(needed, chosen, strict=True):
                inputs[i] = t
            return F(z, *inputs)

        vjp = _vjp(of_needed, *(c[i] for i in needed))
        grads: list[Tensor | None] = [None] * len(c)
        for i, grad in zip(needed, vjp(u), strict=True):
            grads[i] = grad
        return None, None, *grads

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        z, *c = ctx.saved_tensors
        F: Operator = ctx.F
        pairs = zip(tangents[2:], c, strict=True)
        dc = [torch.zeros_like(a) if t is None else t for t, a in pairs]
        functional = torch._C._are_functorch_transforms_active()
        if functional:
            level = _functorch.maybe_current_level() or 0
            z, *c = (_functorch._unwrap_for_grad(t, level) for t in (z, *c))
            dc = [_functorch._unwrap_for_grad(t, level) for t in dc]
        else:
            z, *c = (forward_ad.unpack_dual(t).primal for t in (z, *c))
        # Lower levels of torch.func go on tracking; a plain level must not see its own tangent.
        with forward_ad._set_fwd_grad_enabled(functional):
            vjp = _vjp(lambda *inputs: F(z, *inputs), *c)
            t = _vjp(vjp, torch.zeros_like(z))(tuple(dc))[0]
            return root(_Tangent(F), t, t, z, *c)

    @staticmethod
    def vmap(info: Any, in_dims: Any, F: Operator, z0: Tensor, *c: Tensor) -> tuple[Tensor, int]:
        _, z_dim, *dims = in_dims
        z0 = z0.expand(info.batch_size, *z0.shape) if z_dim is None else z0.movedim(z_dim, 0)
        batched = _Batched(F, tuple(dims), info.randomness)
        out: Tensor = _Root.apply(batched, z0, *c)  # type: ignore[no-untyped-call]
        return out, 0
