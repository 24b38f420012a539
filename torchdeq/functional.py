"""The typed entry point: solve a fixed point and make it differentiable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchdeq.grad import Backward, Implicit, Reversible
from torchdeq.grad.base import NoGraph, beside, unmoved_by
from torchdeq.grad.closure import ExplicitFn, transforms_active
from torchdeq.grad.explicit import root
from torchdeq.packing import PackedFn, Packing, State
from torchdeq.randomness import Randomness
from torchdeq.registry import suggest
from torchdeq.solver import (
    POLICIES,
    Anderson,
    Broyden,
    FixedPointIter,
    Solver,
    SolverStat,
    StopRule,
    report_failures,
    solve,
)
from torchdeq.tracing import untraced


@dataclass(frozen=True)
class FixedPoint:
    """A differentiable fixed point.

    Args:
        z: the state, in the structure of the start.
        states: the states that the backward pass returns, the last of them ``z``.
        stats: how the forward solve went.
    """

    z: State
    states: list[State]
    stats: SolverStat


@untraced
def fixed_point(
    f: Callable[..., State],
    z0: State,
    args: tuple[Any, ...] = (),
    *,
    solver: Solver[Any] | None = None,
    backward: Backward | None = None,
    stop: StopRule | None = None,
    record: Sequence[tuple[int, Backward]] = (),
    compact: bool = False,
    on_failure: str = "warn",
    keep_estimate: bool = False,
) -> FixedPoint:
    r"""Solve :math:`z^\star = f(z^\star)` and attach the gradient of :math:`z^\star`.

    Gradients reach the parameters of modules in ``f``, tensors it closes over and ``args``. Whether
    there is a graph follows the grad mode.

    Args:
        f: called as ``f(z, *args)``, or ``f(*z, *args)`` for a tuple or list state.
        z0: the start. Its gradient is zero, except for a budget of 0 and reversible iterations.
        args: further arguments of ``f``.
        solver: Anderson acceleration if None. A reversible backward runs an iteration of its own.
        backward: implicit differentiation by GMRES if None.
        stop: budget and tolerance of the forward solve.
        record: the state after so many evaluations is returned as well, each made differentiable
            by a backward of its own.
        compact: finished samples leave the batch; every tensor in ``args`` must lead with it.
        on_failure: what to do about samples that did not converge: ignore, warn or raise.
        keep_estimate: return the solver's own estimate, bit for bit, with the gradient of what the
            backward pass attaches beside it; False returns the attached state itself.
    """
    packing = Packing(z0)
    packed = packing.wrap(f, args)
    backward = Implicit() if backward is None else backward
    if not isinstance(backward, Backward):
        raise TypeError(
            f"backward must be a Backward such as Implicit() or Phantom(grad=5), got {backward!r}"
        )
    stop = StopRule() if stop is None else stop
    _check(stop, record, on_failure, keep_estimate)
    ask = _Ask(solver, stop, tuple(record), compact, on_failure, keep_estimate)
    states, stats = _attached(packed, z0, ask, backward)
    shaped = [packing.rebuild(tensors) for tensors in states]
    return FixedPoint(shaped[-1], shaped, stats)


def _check(stop: Any, record: Any, on_failure: str, keep_estimate: bool) -> None:
    if not isinstance(stop, StopRule):
        raise TypeError(f"stop must be a StopRule such as StopRule(max_iter=40), got {stop!r}")
    if on_failure not in POLICIES:
        raise ValueError(f"unknown failure policy {on_failure!r}{suggest(on_failure, POLICIES)}")
    for item in record:
        if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], Backward)):
            raise TypeError(f"record takes pairs of evaluations and a Backward, got {item!r}")
        if isinstance(item[1], Reversible):
            raise ValueError("a reversible iteration cannot be attached to a recorded state")
    if record and keep_estimate:
        raise ValueError("keep_estimate returns one state: drop record")


class _Ask(NamedTuple):
    """What is asked of the forward solve."""

    solver: Solver[Any] | None
    stop: StopRule
    record: tuple[tuple[int, Backward], ...]
    compact: bool
    on_failure: str
    keep_estimate: bool

    @property
    def rule(self) -> Solver[Any]:
        return Anderson() if self.solver is None else self.solver


States = tuple[list[list[Tensor]], SolverStat]


def _attached(f: PackedFn, z0: State, ask: _Ask, backward: Backward) -> States:
    """Differentiable states, the last of them the answer, by whichever path is needed."""
    if isinstance(backward, Reversible):
        return _reversible(f, f.packing.pack(z0), ask, backward)
    again = isinstance(backward, Implicit) and backward.higher_order and torch.is_grad_enabled()
    explicit = again or transforms_active()
    if explicit and ask.compact:
        raise ValueError(
            "compact=True cannot be combined with higher_order=True, torch.func transforms or "
            "forward mode: they need the whole batch again in the backward pass"
        )
    path = _explicit if explicit else _kept_graph
    states, stats = path(f, z0, ask, backward)
    unrolled = not ask.stop.max_iter and not isinstance(backward, Implicit)
    if torch.is_grad_enabled() and not unrolled:
        start = f.packing.split(f.packing.pack(z0))
        states = [unmoved_by(start, tensors) for tensors in states]
    return states, stats


def _kept_graph(f: PackedFn, z0: State, ask: _Ask, backward: Backward) -> States:
    """Solve without a graph, then attach one at the solved states."""
    packing, stop = f.packing, ask.stop
    shine = isinstance(backward, Implicit) and backward.init == "shine"
    if shine and (not isinstance(ask.rule, Broyden) or ask.compact):
        raise ValueError(
            "init='shine' reuses the inverse Jacobian of the forward solve: that must be Broyden's "
            f"on the whole batch, got {type(ask.rule).__name__} with compact={ask.compact}"
        )
    found = solve(
        f.f, z0, ask.rule, stop, [k for k, _ in ask.record], args=f.args, compact=ask.compact,
        on_failure=ask.on_failure, keep_memory=shine,
    )  # fmt: skip
    if ask.keep_estimate and not torch.is_grad_enabled():
        return [packing.split(packing.pack(found.z))], found.stats
    states: list[list[Tensor]] = []
    for z_k, (_, method) in zip(found.states, ask.record, strict=True):
        states += method.attach(f, packing.pack(z_k))
    if isinstance(backward, Implicit):
        backward = backward.informed(found)
    # With nothing solved, the start keeps its graph: backpropagation through time reaches it.
    z = packing.pack(found.z if stop.max_iter else z0)
    if not ask.keep_estimate:
        return [*states, *backward.attach(f, z)], found.stats
    estimate = packing.split(z.detach())
    try:
        attached = backward.attach(f, z)[-1]
    except NoGraph:  # nothing to differentiate: the estimate is all that was asked for
        return [estimate], found.stats
    return [beside(estimate, attached)], found.stats


def _reversible(f: PackedFn, z0: Tensor, ask: _Ask, backward: Reversible) -> States:
    """An iteration that is its own solver."""
    if ask.solver not in (None, FixedPointIter()):
        raise ValueError(
            "a reversible backward runs its own damped iteration: the solver must be "
            f"fixed_point_iter without options, got {ask.solver}"
        )
    if ask.record or ask.compact:
        raise ValueError(
            "a reversible iteration gives its last state, for the whole batch: drop "
            + ("record" if ask.record else "compact=True")
        )
    states, stats = backward.run(f, z0, ask.stop)
    if ask.on_failure != "ignore" and ask.stop.goal and ask.stop.max_iter:
        report_failures(stats, ask.on_failure, "the reversible iteration")
    return states, stats


def _explicit(f: PackedFn, z0: State, ask: _Ask, backward: Backward) -> States:
    """The path on which everything that ``f`` uses is an input."""
    packing, start = f.packing, f.packing.pack(z0).detach()
    states: list[list[Tensor]] = []
    stats = SolverStat()
    # A function transform cannot look into a solve: each sampled state has one of its own.
    samples = () if ask.keep_estimate else ask.record
    for k, method in (*samples, (ask.stop.max_iter, backward)):
        part = ask._replace(stop=replace(ask.stop, max_iter=k), record=())
        F = _Equilibrium(f, start, part, method)
        z = root(F, start, *F.explicit.inputs)
        stats = F.stats
        if isinstance(method, Implicit):
            states.append(packing.split(z.clone()))  # the caller may write into it
        elif ask.stop.max_iter:
            states += method.attach(f, z.detach())
        else:
            states += method.attach(f, packing.pack(z0))
    if ask.keep_estimate and not isinstance(backward, Implicit):
        states = [beside(packing.split(z.detach()), states[-1])]
    return states, stats


class _Equilibrium:
    """The operator of a fixed point: ``f`` with explicit inputs, and both solves."""

    def __init__(self, packed: PackedFn, z0: Tensor, ask: _Ask, backward: Backward) -> None:
        self.explicit, self.ask = ExplicitFn(packed), ask
        self.explicit.rehearse(z0)
        self.implicit = isinstance(backward, Implicit)
        self.method = backward if isinstance(backward, Implicit) else Implicit()
        self.stats = SolverStat()

    def make(self, *c: Tensor) -> Callable[[Tensor], Tensor]:
        return self.explicit.make(*c)

    def __call__(self, z: Tensor, *c: Tensor) -> Tensor:
        return self.explicit(z, *c)

    def solve(self, f: Callable[[Tensor], Tensor], z0: Tensor) -> Tensor:
        """The forward solve; ``z0`` may have lost a dimension to ``vmap`` or won one."""
        ask, rows = self.ask, z0.reshape(prod(z0.shape[:-1]), z0.shape[-1])

        def on_rows(z: Tensor) -> Tensor:
            return f(z.view(z0.shape)).reshape(rows.shape)

        found = solve(on_rows, rows, ask.rule, ask.stop, on_failure=ask.on_failure)
        self.stats = found.stats
        z: Tensor = found.z.view(z0.shape)
        if self.implicit and not ask.keep_estimate:
            return self.explicit.last_call(f, z)
        self.explicit.repeat(Randomness(z.device))
        return z

    def solve_affine(self, f: Callable[[Tensor], Tensor], g: Tensor) -> Tensor:
        """``u = A u + g`` where ``f(u) = A u + g``: an adjoint or a tangent system."""
        rows = g.reshape(prod(g.shape[:-1]), g.shape[-1])

        def product(u: Tensor) -> Tensor:
            return f(u.view(g.shape)).reshape(rows.shape) - rows

        return self.method.solve_adjoint(product, rows).view(g.shape)
