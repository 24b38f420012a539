"""Reversible iteration: exact gradients without a stored trajectory, by iterating backwards."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Self

import torch
from torch import Tensor

from torchdeq import _torch
from torchdeq.callers import stack_level
from torchdeq.distributed.sharding import gathered, reduce_gradients
from torchdeq.experimental.double_double import PlainNumber, PreciseNumber, most_precise
from torchdeq.experimental.recorded_calls import RecordedCalls
from torchdeq.failures import ConvergenceWarning
from torchdeq.grad.base import BACKWARDS, IteratingBackward, NoGraph
from torchdeq.numbers import small_dtype
from torchdeq.packed import PackedFn
from torchdeq.stats import SolverStat
from torchdeq.stopping import StopRule


@BACKWARDS.register("reversible")
@dataclass(frozen=True, kw_only=True)
class Reversible(IteratingBackward):
    r"""Gradient of a reversible iteration (McCallum et al., 2025).

    The published method updates two coupled states in turn. Here they are one sequence:

    $$z^{k+1} = (1 - \tau)\, z^{k-1} + \tau f(z^k), \qquad
    z^{k-1} = \frac{z^{k+1} - \tau f(z^k)}{1 - \tau}$$

    from $z^{-1} = z^0$. Its fixed points are those of $f$. The backward pass computes the states
    again from the last two of them, so memory does not depend on the number of steps. The gradient
    is that of the iteration itself, converged or not, and the start has a gradient too. The
    backward pass costs one evaluation of `f` and one product per step.

    Every backward step magnifies rounding errors by up to $1 / (1 - \tau)$. So the states are
    double-doubles. At the end, the backward pass compares the start that it has computed with the
    true one, and warns if the error matters. At `tau` 0.75 some 45 steps are safe, at 0.5 a
    hundred. The arithmetic is cheapest where $1 - \tau$ is a power of two.

    Inside `torch.func` transforms and in forward mode, the iteration is differentiated as a plain
    loop, with memory for every step.

    Args:
        tau: the weight of the new image in each step, in (0, 1).
    """

    tau: float = 0.75

    def __post_init__(self) -> None:
        if not 0 < self.tau < 1:
            raise ValueError(
                f"tau must lie in (0, 1) for a reversible iteration, got {self.tau}: with 1 a step "
                "drops the older state and cannot be reversed"
            )

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        # The default of the option, tau = 1, cannot be reversed.
        return cls() if options["tau"] == 1 else cls(tau=options["tau"])

    def run(self, f: PackedFn, z0: Tensor, stop: StopRule) -> tuple[list[list[Tensor]], SolverStat]:
        """Iterate from `z0` for `stop.max_iter` evaluations; return the state and statistics."""
        calls = RecordedCalls(f, stop)
        # At once: the operations that gather a unit must not be part of a recorded call.
        with f.autocast.suspended(), gathered(f.peers.units, "by_setting", at_once=True):
            if _torch.transforms_active() or not stop.max_iter:
                z = self._iterate(calls, PlainNumber.of(z0), stop.max_iter)[1].hi
            else:
                z = self._run_reversibly(calls, z0, stop.max_iter)
        return [f.packing.split(z)], calls.stats()

    def _run_reversibly(self, f: RecordedCalls, z0: Tensor, steps: int) -> Tensor:
        """Return the last state, with a graph that reverses the iteration if grad mode is on."""
        # Double-doubles even where f is in single precision: an error in the last digit of a double
        # makes one of many entries round to another single-precision number, for which f has
        # another value.
        with torch.no_grad():
            older, newer = self._iterate(f, most_precise(z0.detach()), steps)
        z = newer.hi.to(z0.dtype)
        if not torch.is_grad_enabled():
            return z
        inputs = f.inputs
        if not any(t.requires_grad for t in inputs):
            with torch.enable_grad():  # raises if f has inputs that no record contains
                f.repeat(0, z0.detach().clone().requires_grad_(), inputs)
        out: Tensor = _ReversedIteration.apply(z, newer, older, z0, self.tau, f, *inputs)  # type: ignore[no-untyped-call]
        return out

    def _iterate(
        self, f: Callable[[Tensor], Tensor], z0: PreciseNumber, steps: int
    ) -> tuple[PreciseNumber, PreciseNumber]:
        """Return the last two states; `f` gets them in its own precision."""
        older = z = z0
        for _ in range(steps):
            step = f(z.hi).to(z.hi.dtype) * self.tau
            older, z = z, older.times(1 - self.tau).plus(step)
        return older, z


class _ReversedIteration(torch.autograd.Function):
    """The last state of an iteration without a graph; its backward reverses the iteration."""

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, newer: PreciseNumber, older: PreciseNumber, z0: Tensor, tau: float,
        calls: RecordedCalls, *c: Tensor,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(*newer, *older, z0, *c)
        ctx.tau, ctx.calls, ctx.number = tau, calls, type(newer)
        return z.clone()  # the caller may write into it

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        _raise_for_unsupported(g)
        calls, tau, saved = ctx.calls, ctx.tau, iter(ctx.saved_tensors)
        newer, older = (ctx.number._make(islice(saved, len(ctx.number._fields))) for _ in range(2))
        z0, *c = saved
        c = [t.detach() for t in c]
        needed = [i for i in range(len(c)) if ctx.needs_input_grad[6 + i]]
        for i in needed:
            c[i].requires_grad_()
        grads: list[Tensor | None] = [None] * len(c)
        u_older, u = torch.zeros_like(g), g  # cotangents of the two states
        units = calls.f.peers.units
        with calls.f.autocast.suspended(), gathered(units, "always", at_once=True):
            for k in reversed(range(calls.steps)):
                h = older.hi.to(z0.dtype, copy=True).requires_grad_()
                with torch.enable_grad():
                    fh = calls.repeat(k, h, c)
                product, *terms = _products(fh, [h, *(c[i] for i in needed)], tau * u)
                for i, term in zip(needed, terms, strict=True):
                    if term is not None:  # out of place: two inputs may share one tensor
                        total = grads[i]
                        grads[i] = term if total is None else total + term
                step = fh.detach().to(older.hi.dtype) * tau
                older, newer = newer.plus(-step).over(1 - tau), older
                u_older, u = (1 - tau) * u, u_older if product is None else u_older + product
            _warn_if_imprecise(older.hi, z0, u_older, g)
            if units:
                grads = reduce_gradients(units, calls.inputs, grads)
        start_grad = (u_older + u).to(z0.dtype) if ctx.needs_input_grad[3] else None
        return None, None, None, start_grad, None, None, *grads


def _raise_for_unsupported(g: Tensor) -> None:
    """Raise for a backward pass with `create_graph=True` or with several cotangents at once."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "the gradient of a reversible iteration is of first order only, but create_graph=True "
            "asks for a higher order: use implicit differentiation with higher_order=True, or "
            "unroll"
        )
    if _torch.is_legacy_batched(g):
        raise RuntimeError(
            "a reversible iteration takes one cotangent at a time: call grad in a loop, without "
            "is_grads_batched or vectorize"
        )


def _products(fh: Tensor, inputs: list[Tensor], u: Tensor) -> tuple[Tensor | None, ...]:
    """Return the products of the cotangent `u` with the Jacobian of `fh` in each input."""
    if not fh.requires_grad:
        if len(inputs) > 1:
            raise NoGraph
        return (None,)  # f is constant
    return torch.autograd.grad(fh, inputs, u.to(fh.dtype), allow_unused=True)


def _warn_if_imprecise(computed: Tensor, z0: Tensor, u: Tensor, g: Tensor) -> None:
    """Warn if the error of the states, weighted by their cotangents, changes the gradient.

    On the way from the last state to the start, errors grow and cotangents shrink geometrically, so
    their product is largest at one of the two ends. At the last state the error is zero; at the
    start it can be measured.

    Args:
        computed: the start that the backward pass has computed.
        z0: the true start.
        u: the cotangent of the start.
        g: the cotangent of the last state.
    """
    if not z0.numel():
        return
    dtype = small_dtype(z0.device)
    error, size, u_size, g_size = (
        torch.linalg.vector_norm(t.to(dtype)) for t in (computed - z0, z0, u, g)
    )
    error, weight = error / (1 + size), u_size / g_size.clamp_min(torch.finfo(dtype).tiny)
    if bool(error * weight > torch.finfo(z0.dtype).eps ** 0.5):
        warnings.warn(
            "the backward pass of a reversible iteration lost precision, so its gradient is "
            "inaccurate: take fewer steps, a smaller tau or double precision",
            ConvergenceWarning,
            stacklevel=stack_level(),
        )
