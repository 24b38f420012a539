"""Reversible iteration: exact gradients without keeping a trajectory, by running it backwards."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from torchdeq import _torch
from torchdeq.callers import stack_level
from torchdeq.failures import ConvergenceWarning
from torchdeq.grad.base import BACKWARDS, Backward, NoGraph
from torchdeq.grad.capture import Capture, observe
from torchdeq.grad.twofold import OneFold, TwoFold
from torchdeq.grad.watching import Inputs
from torchdeq.modules import ModuleState
from torchdeq.numbers import has_double, row_norm, small_dtype
from torchdeq.packed import PackedFn
from torchdeq.randomness import Randomness
from torchdeq.stats import SolverStat
from torchdeq.stopping import Status, StopRule, relative

Digits = OneFold | TwoFold


@BACKWARDS.register("reversible")
@dataclass(frozen=True, kw_only=True)
class Reversible(Backward):
    r"""Gradient of a reversible iteration (McCallum et al., 2025).

    Two coupled states, here one sequence in which each is updated from the one before the last:

    .. math:: z^{k+1} = (1 - \tau)\, z^{k-1} + \tau f(z^k), \qquad
              z^{k-1} = \frac{z^{k+1} - \tau f(z^k)}{1 - \tau}

    from :math:`z^{-1} = z^0`. The fixed points are those of :math:`f`. The backward pass rebuilds
    the states from the last two of them, so memory does not depend on the number of steps, and the
    gradient is that of the iteration itself, whether or not it has converged; the start gets its
    share too. It costs one evaluation of ``f`` and one product per step.

    Every step backwards magnifies rounding by up to :math:`1 / (1 - \tau)`. The states are
    therefore held in twice double precision; the backward pass ends by comparing the start it
    rebuilt with the true one, and warns if that error matters. At ``tau`` 0.75 some 45 steps are
    safe, at 0.5 a hundred. With :math:`1 - \tau` a power of two this costs least.

    Inside ``torch.func`` transforms and in forward mode the iteration is differentiated as it
    stands, with memory for every step.

    Args:
        tau: how far each step goes, in (0, 1).
    """

    tau: float = 0.75

    def __post_init__(self) -> None:
        if not 0 < self.tau < 1:
            raise ValueError(
                f"tau must lie in (0, 1) for a reversible iteration, got {self.tau}: with 1 the "
                "older state is forgotten and cannot be rebuilt"
            )

    def attach(self, f: PackedFn, z: Tensor) -> list[list[Tensor]]:
        """The gradient of a single step; use :meth:`run` for the whole iteration."""
        return self.run(f, z, StopRule(1))[0]

    def run(self, f: PackedFn, z0: Tensor, stop: StopRule) -> tuple[list[list[Tensor]], SolverStat]:
        """``stop.max_iter`` evaluations from ``z0``; the state and how well it is solved."""
        record = _Record(f, stop)
        with f.autocast.suspended():
            if _torch.transforms_active() or not stop.max_iter:
                z = self._iterate(record, OneFold.of(z0), stop.max_iter)[1].hi
            else:
                with torch.no_grad():
                    older, newer = self._iterate(record, _start(z0.detach()), stop.max_iter)
                z = newer.hi.to(z0.dtype)
                if torch.is_grad_enabled():
                    inputs = record.inputs
                    if not any(t.requires_grad for t in inputs):
                        with torch.enable_grad():  # raises if there are inputs it could not see
                            record.repeat(0, z0.detach().clone().requires_grad_(), inputs)
                    z = _Iteration.apply(z, newer, older, z0, self.tau, record, *inputs)  # type: ignore[no-untyped-call]
        return [f.packing.split(z)], record.stats()

    def _iterate(
        self, f: Callable[[Tensor], Tensor], z0: Digits, steps: int
    ) -> tuple[Digits, Digits]:
        """The last two states; ``f`` sees them in its own precision."""
        older = z = z0
        for _ in range(steps):
            step = f(z.hi).to(z.hi.dtype) * self.tau
            older, z = z, older.times(1 - self.tau).plus(step)
        return older, z


class _Record:
    """Calls ``f``, notes how the iteration goes, and can repeat every call just so.

    The gradient is that of every step, and control flow may differ from one to the next, so each
    call is watched for its inputs.
    """

    def __init__(self, f: PackedFn, stop: StopRule) -> None:
        self.f, self.stop = f, stop
        self._watches = torch.is_grad_enabled() and not _torch.transforms_active()
        self._inputs: Inputs = {}
        self._calls: list[tuple[frozenset[int], Randomness | None]] = []
        self._modules: ModuleState | None = None
        self._sizes: list[Tensor] = []
        self._norms: list[Tensor] = []

    def __call__(self, z: Tensor) -> Tensor:
        if _torch.transforms_active():
            return self.f(z)
        z = z.to(self.f.packing.dtype)
        if self._watches:
            fz, inputs, drawn = observe(self.f, z)
            self._inputs |= inputs
            self._calls.append((frozenset(inputs), drawn))
        else:
            fz = self.f(z)
        self._sizes.append(row_norm(fz - z))
        self._norms.append(row_norm(fz))
        return fz

    @property
    def steps(self) -> int:
        return len(self._calls)

    @property
    def inputs(self) -> list[Tensor]:
        """Everything that some call used."""
        return self._record(frozenset(), None).inputs

    def repeat(self, k: int, z: Tensor, c: list[Tensor]) -> Tensor:
        """Return the ``k``-th call once more, of other tensors."""
        return self._record(*self._calls[k]).replay(*c)(z)

    def _record(self, used: frozenset[int], drawn: Randomness | None) -> Capture:
        if self._modules is None:
            self._modules = ModuleState(self.f.f)  # once all calls have been made
        return Capture(self.f, self._inputs, used, self._modules, drawn)

    def stats(self) -> SolverStat:
        """Of the last evaluation: the iteration neither stops early nor goes back to a best one."""
        if not self._sizes:
            batch = self.f.packing.batch
            return SolverStat(status=torch.full((batch,), int(Status.MAX_ITER), dtype=torch.int8))
        sizes, norms = torch.stack(self._sizes), torch.stack(self._norms)  # (N, B)
        rel, last = relative(sizes, norms), self.stop.measure(sizes[-1], norms[-1])
        met = (last <= self.stop.goal) & bool(self.stop.goal)
        status = torch.where(met, int(Status.CONVERGED), int(Status.MAX_ITER))
        status = torch.where(last.isfinite(), status, int(Status.NONFINITE)).to(torch.int8)
        return SolverStat(
            abs_lowest=sizes[-1],
            rel_lowest=rel[-1],
            abs_trace=sizes.mT,
            rel_trace=rel.mT,
            nstep=torch.full_like(sizes[-1], len(sizes)),
            nfe=len(sizes),
            status=status,
        )


class _Iteration(torch.autograd.Function):
    """The last state of an iteration that was run without a graph, with its gradient."""

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, newer: Digits, older: Digits, z0: Tensor, tau: float, record: _Record,
        *c: Tensor,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(*newer, *older, z0, *c)
        ctx.tau, ctx.record, ctx.digits = tau, record, type(newer)
        return z.clone()  # the caller may write into what he gets

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the gradient of a reversible iteration is of first order, and create_graph asks "
                "for more: use implicit differentiation with higher_order=True, or unroll"
            )
        if _torch.is_legacy_batched(g):
            raise RuntimeError(
                "a reversible iteration goes back with one cotangent at a time: call grad in a "
                "loop instead of with is_grads_batched or vectorize"
            )
        record, tau, saved = ctx.record, ctx.tau, iter(ctx.saved_tensors)
        newer, older = (ctx.digits._make(islice(saved, len(ctx.digits._fields))) for _ in "ab")
        z0, *c = saved
        c = [t.detach() for t in c]
        wanted = [i for i in range(len(c)) if ctx.needs_input_grad[6 + i]]
        for i in wanted:
            c[i].requires_grad_()
        grads: list[Tensor | None] = [None] * len(c)
        u_older, u = torch.zeros_like(g), g  # cotangents of the two states
        with record.f.autocast.suspended():
            for k in reversed(range(record.steps)):
                h = older.hi.to(z0.dtype, copy=True).requires_grad_()
                with torch.enable_grad():
                    fh = record.repeat(k, h, c)
                through, *shares = _products(fh, [h, *(c[i] for i in wanted)], tau * u)
                for i, share in zip(wanted, shares, strict=True):
                    if share is not None:  # out of place: it may be the tensor of another input
                        total = grads[i]
                        grads[i] = share if total is None else total + share
                step = fh.detach().to(older.hi.dtype) * tau
                older, newer = newer.plus(-step).over(1 - tau), older
                u_older, u = (1 - tau) * u, u_older if through is None else u_older + through
            _check_start(older.hi, z0, u_older, g)
        at_start = (u_older + u).to(z0.dtype) if ctx.needs_input_grad[3] else None
        return None, None, None, at_start, None, None, *grads


def _products(fh: Tensor, inputs: list[Tensor], u: Tensor) -> tuple[Tensor | None, ...]:
    if not fh.requires_grad:
        if len(inputs) > 1:
            raise NoGraph
        return (None,)  # f depends on nothing
    return torch.autograd.grad(fh, inputs, u.to(fh.dtype), allow_unused=True)


def _start(z0: Tensor) -> Digits:
    """The start with digits to spare for the way back.

    Double precision alone is not enough even for a few steps in single precision: an error of the
    last digit lets some element out of many round to another single-precision number, for which
    ``f`` is another.
    """
    return TwoFold.of(z0) if has_double(z0.device) else OneFold.of(z0)


def _check_start(rebuilt: Tensor, z0: Tensor, u: Tensor, g: Tensor) -> None:
    """Warn if the error of the rebuilt start, weighted as the gradient weights it, matters.

    Errors grow and cotangents shrink geometrically on the way back, so their product is largest at
    one of the ends; at the far one it is known.
    """
    if not z0.numel():
        return
    dtype = small_dtype(z0.device)
    error, size, u_size, g_size = (
        torch.linalg.vector_norm(t.to(dtype)) for t in (rebuilt - z0, z0, u, g)
    )
    error, share = error / (1 + size), u_size / g_size.clamp_min(torch.finfo(dtype).tiny)
    if bool(error * share > torch.finfo(z0.dtype).eps ** 0.5):
        warnings.warn(
            "the way back of a reversible iteration lost precision, and the gradient with it: take "
            "fewer steps, a smaller tau or double precision",
            ConvergenceWarning,
            stacklevel=stack_level(),
        )
