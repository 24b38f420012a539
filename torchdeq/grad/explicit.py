"""Implicit differentiation with explicit inputs: exact at every order, in both modes.

A fixed point `z = F(z, *c)` is an `autograd.Function` of `c`. Its derivative is another fixed point
of the same kind, that of the adjoint or tangent system, and calls the same Function. So higher
orders need no further code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from torchdeq import _torch
from torchdeq.grad.base import NoGraph

Map = Callable[[Tensor], Tensor]


class Operator(Protocol):
    """A map `F(z, *c)` that can solve for its fixed point and for those of its derivatives."""

    functional: bool  # whether the operator was created inside a `torch.func` transform

    def solve(self, f: Map, z0: Tensor) -> tuple[Tensor, ...]:
        """Return the fixed point of `f`, preceded by its image if the image is the answer.

        All tensors are plain here, of shape (..., D).
        """

    def solve_affine(self, product: Map, g: Tensor) -> Tensor:
        """Return the fixed point of `A v + g` where `product(v) = A v`."""

    def map_to_solve(self, *c: Tensor) -> Map:
        """Return `z -> F(z, *c)` as `solve` takes it; for an affine map, its linear part."""

    def map_to_differentiate(self, *c: Tensor) -> Map:
        """Return `z -> F(z, *c)` to be called and differentiated at the solved state."""


def root(F: Operator, z0: Tensor, *c: Tensor) -> Tensor:
    """Return the fixed point of `F(., *c)`, or its image, differentiable in `c`."""
    if not torch.is_grad_enabled() and not _torch.transforms_active():
        return F.solve(F.map_to_solve(*c), z0)[0]
    z: Tensor = _Root.apply(F, z0, *c)[0]  # type: ignore[no-untyped-call]
    return z


def _vjp(
    functional: bool, f: Callable[..., Any], *inputs: Tensor, context: Iterable[Tensor] = ()
) -> Callable[[Any], tuple[Tensor, ...]]:
    """Return a function that multiplies cotangents by the transposed Jacobian of `f`.

    Function transforms must not be mixed with plain autograd, and plain autograd also
    differentiates maps that transforms cannot: an `f` with `torch.autograd.grad` or a checkpoint
    inside.

    Args:
        functional: whether `f` belongs to a function transform, which may have ended by now.
        f: a function of the inputs.
        *inputs: the point of linearisation.
        context: further tensors that `f` depends on.
    """
    if functional or _torch.function_transforms_active():
        return _functional_vjp(f, *inputs)
    differentiable = any(t.requires_grad for t in (*inputs, *context))
    aliases = _independent_aliases(inputs)
    with torch.enable_grad():
        out = f(*aliases)
    outs: tuple[Tensor, ...] = out if isinstance(out, tuple) else (out,)
    attached = [i for i, t in enumerate(outs) if t.requires_grad]
    if aliases and not attached:
        raise NoGraph

    def product(v: Any) -> tuple[Tensor, ...]:
        if not aliases:
            return ()
        cotangents = v if isinstance(v, tuple) else (v,)
        create_graph = differentiable or any(t.requires_grad for t in cotangents)
        grads: tuple[Tensor, ...] = torch.autograd.grad(
            [outs[i] for i in attached], aliases, [cotangents[i] for i in attached],
            retain_graph=True, create_graph=create_graph and torch.is_grad_enabled(),
            materialize_grads=True, allow_unused=True,
        )  # fmt: skip
        return grads

    return product


def _independent_aliases(inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Return aliases of the inputs to differentiate by; none is computed from another.

    An input may have been computed from another one. An alias keeps the graph of its input if the
    grad mode is on.
    """
    connect = torch.is_grad_enabled()
    with torch.enable_grad():
        return [
            t.view_as(t) if connect and t.requires_grad else t.detach().requires_grad_()
            for t in inputs
        ]


def _functional_vjp(f: Callable[..., Any], *inputs: Tensor) -> Callable[[Any], tuple[Tensor, ...]]:
    """Return `torch.func.vjp` of `f`, with a clear error for activations saved through hooks."""
    try:
        vjp: Callable[[Any], tuple[Tensor, ...]] = torch.func.vjp(f, *inputs)[1]
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error):
            raise
        raise RuntimeError(
            "f saves activations through hooks (a checkpoint, save_on_cpu), which torch.func "
            "cannot differentiate: leave them out inside transforms, or use torch.autograd instead"
        ) from error
    return vjp


class _AdjointMap:
    r"""The map $v \mapsto J^\top v + g$ with inputs `(g, z, *c)`."""

    def __init__(self, F: Operator) -> None:
        self.F, self.functional = F, F.functional
        self.solve_affine = F.solve_affine

    def solve(self, f: Map, z0: Tensor) -> tuple[Tensor, ...]:
        return (self.solve_affine(f, z0),)

    def map_to_solve(self, *inputs: Tensor) -> Map:
        _, z, *c = inputs
        vjp = _vjp(self.functional, self.F.map_to_differentiate(*c), z, context=c)
        return lambda v: vjp(v)[0]

    def map_to_differentiate(self, *inputs: Tensor) -> Map:
        product = self.map_to_solve(*inputs)
        return lambda v: product(v) + inputs[0]


class _TangentMap(_AdjointMap):
    r"""The map $u \mapsto J u + t$ with inputs `(t, z, *c)`.

    $J u$ is computed as the adjoint of $v \mapsto J^\top v$: forward mode would be nested inside
    the current level of forward mode.
    """

    def map_to_solve(self, *inputs: Tensor) -> Map:
        _, z, *c = inputs
        vjp = _vjp(self.functional, self.F.map_to_differentiate(*c), z, context=c)
        jvp = _vjp(self.functional, lambda v: vjp(v)[0], torch.zeros_like(z), context=(z, *c))
        return lambda u: jvp(u)[0]


class _BatchedOperator:
    """An operator under `vmap`: the solver sees plain tensors with one more batch dimension."""

    def __init__(self, F: Operator, dims: tuple[int | None, ...], randomness: str) -> None:
        self.F, self.dims, self.randomness = F, dims, randomness
        self.functional = F.functional
        self.solve, self.solve_affine = F.solve, F.solve_affine

    def map_to_solve(self, *c: Tensor) -> Map:
        return self._vectorized(self.F.map_to_solve, c)

    def map_to_differentiate(self, *c: Tensor) -> Map:
        return self._vectorized(self.F.map_to_differentiate, c)

    def _vectorized(self, map_of: Callable[..., Map], c: tuple[Tensor, ...]) -> Map:
        def call(z: Tensor, *c: Tensor) -> Tensor:
            return map_of(*c)(z)

        batched = torch.func.vmap(call, (0, *self.dims), randomness=self.randomness)
        return lambda z: batched(z, *c)


class _Root(torch.autograd.Function):
    """The Function of the solved state alone, or of its image and the state.

    Both outputs have the same derivative.
    """

    @staticmethod
    def forward(F: Operator, z0: Tensor, *c: Tensor) -> tuple[Tensor, ...]:
        with _torch.forward_mode(False):
            return tuple(t.clone() for t in F.solve(F.map_to_solve(*c), z0))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.F, _, *c = inputs
        ctx.outputs = len(output)
        ctx.set_materialize_grads(False)
        # The state is a saved output, so it is attached and the recursion below is exact.
        ctx.save_for_backward(output[-1], *c)
        ctx.save_for_forward(output[-1], *c)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        z, *c = ctx.saved_tensors
        F: Operator = ctx.F
        defined = [g for g in cotangents if g is not None]
        if not defined:
            return None, None, *([None] * len(c))
        g = defined[0] if len(defined) == 1 else defined[0] + defined[1]
        if torch.is_grad_enabled() and _torch.is_legacy_batched(g):
            raise RuntimeError(
                "gradients for several cotangents at once (is_grads_batched, vectorize) have no "
                "graph of their own, and create_graph asks for one: call grad in a loop over the "
                "cotangents, or use torch.func"
            )
        u = root(_AdjointMap(F), g, g, z, *c)
        needed = [i for i in range(len(c)) if ctx.needs_input_grad[2 + i]]

        def f_of_needed(*chosen: Tensor) -> Tensor:
            inputs = list(c)
            for i, t in zip(needed, chosen, strict=True):
                inputs[i] = t
            return F.map_to_differentiate(*inputs)(z)

        vjp = _vjp(F.functional, f_of_needed, *(c[i] for i in needed), context=(z, *c))
        grads: list[Tensor | None] = [None] * len(c)
        for i, grad in zip(needed, vjp(u), strict=True):
            grads[i] = grad
        return None, None, *grads

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        z, *c = ctx.saved_tensors
        F: Operator = ctx.F
        pairs = zip(tangents[2:], c, strict=True)
        dc = [torch.zeros_like(a) if t is None else t for t, a in pairs]
        functional = _torch.function_transforms_active()
        if functional:
            level = _torch.current_level()
            z, *c = (_torch.without_level(t, level) for t in (z, *c))
            dc = [_torch.without_level(t, level) for t in dc]
        else:
            z, *c = (forward_ad.unpack_dual(t).primal for t in (z, *c))
        # Lower levels of torch.func must go on tracking; a dual level must not see its own tangent.
        with _torch.forward_mode(functional):
            f_of_c = lambda *inputs: F.map_to_differentiate(*inputs)(z)  # noqa: E731
            vjp = _vjp(F.functional, f_of_c, *c, context=(z,))
            t = _vjp(F.functional, vjp, torch.zeros_like(z), context=(z, *c))(tuple(dc))[0]
            u = root(_TangentMap(F), t, t, z, *c)
        return u if ctx.outputs == 1 else (u, u.clone())

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, F: Operator, z0: Tensor, *c: Tensor
    ) -> tuple[tuple[Tensor, ...], Any]:
        _, z_dim, *dims = in_dims
        z0 = z0.expand(info.batch_size, *z0.shape) if z_dim is None else z0.movedim(z_dim, 0)
        batched = _BatchedOperator(F, tuple(dims), info.randomness)
        out: tuple[Tensor, ...] = _Root.apply(batched, z0, *c)  # type: ignore[no-untyped-call]
        return out, (0,) * len(out)
