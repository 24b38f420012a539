"""Reversible iteration: exact gradients without keeping a trajectory, by running it backwards."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor

from torchdeq.callers import stack_level
from torchdeq.grad.base import BACKWARDS, Backward, NoGraph
from torchdeq.grad.closure import ExplicitFn, transforms_active
from torchdeq.grad.twofold import OneFold, TwoFold
from torchdeq.packing import PackedFn
from torchdeq.randomness import Randomness
from torchdeq.solver import ConvergenceWarning, SolverStat, Status, StopRule
from torchdeq.solver.stopping import relative

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
            if transforms_active() or not stop.max_iter:
                z = self._iterate(record, OneFold.of(z0), stop.max_iter)[1].hi
            else:
                with torch.no_grad():
                    older, newer = self._iterate(record, _start(z0.detach()), stop.max_iter)
                z = newer.hi.to(z0.dtype)
                if torch.is_grad_enabled():
                    record.end()
                    inputs = record.explicit.inputs
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
    """Calls ``f``, notes how the iteration goes, and can repeat every call just so."""

    def __init__(self, f: PackedFn, stop: StopRule) -> None:
        self.explicit, self.stop = ExplicitFn(f), stop
        self._f = f
        self._drawn: list[Randomness | None] = []
        self._sizes: list[Tensor] = []
        self._norms: list[Tensor] = []

    def __call__(self, z: Tensor) -> Tensor:
        if transforms_active():
            return self._f(z)
        z = z.to(self._f.packing.dtype)
        before = Randomness(z.device)
        fz = self._f(z) if self._drawn else self.explicit.watch(z)
        self._drawn.append(before if before.used else None)
        self._sizes.append(torch.linalg.vector_norm(fz - z, dim=1))
        self._norms.append(torch.linalg.vector_norm(fz, dim=1))
        return fz

    @property
    def steps(self) -> int:
        return len(self._drawn)

    def end(self) -> None:
        """No more calls but repeated ones."""
        self.explicit.repeat(None)

    def repeat(self, k: int, z: Tensor, c: list[Tensor]) -> Tensor:
        """The ``k``-th call once more, of other tensors."""
        self.explicit.repeat(self._drawn[k])
        return self.explicit(z, *c)

    def stats(self) -> SolverStat:
        """Of the last evaluation: the iteration neither stops early nor goes back to a best one."""
        if not self._sizes:
            batch = self._f.packing.batch
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
        if is_legacy_batchedtensor(g):
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
        with record.explicit.f.autocast.suspended():
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
    return OneFold.of(z0) if z0.device.type == "mps" else TwoFold.of(z0)  # mps has no doubles


def _check_start(rebuilt: Tensor, z0: Tensor, u: Tensor, g: Tensor) -> None:
    """Warn if the error of the rebuilt start, weighted as the gradient weights it, matters.

    Errors grow and cotangents shrink geometrically on the way back, so their product is largest at
    one of the ends; at the far one it is known.
    """
    if not z0.numel():
        return
    norm = torch.linalg.vector_norm
    error = norm((rebuilt - z0).double()) / (1 + norm(z0.double()))
    share = norm(u.double()) / norm(g.double()).clamp_min(1e-300)
    if bool(error * share > torch.finfo(z0.dtype).eps ** 0.5):
        warnings.warn(
            "the way back of a reversible iteration lost precision, and the gradient with it: take "
            "fewer steps, a smaller tau or double precision",
            ConvergenceWarning,
            stacklevel=stack_level(),
        )
