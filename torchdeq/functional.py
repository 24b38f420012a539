"""The typed entry point: solve a fixed point and make it differentiable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchdeq._torch import function_transforms_active, is_legacy_batched, transforms_active
from torchdeq.grad import Backward, Implicit, Reversible
from torchdeq.grad.adjoint import on_all_cotangents, solve_adjoint
from torchdeq.grad.base import NoGraph, beside, unmoved_by
from torchdeq.grad.capture import Capture, Found, LateInputs, LiveFn, capture, rehearse
from torchdeq.grad.explicit import root
from torchdeq.grad.implicit import coupling_of
from torchdeq.modules import ModuleState
from torchdeq.packing import PackedFn, Packing, State, aux_at, without_aux
from torchdeq.randomness import Randomness
from torchdeq.registry import suggest
from torchdeq.solver import (
    POLICIES,
    Anderson,
    Broyden,
    Coupling,
    FixedPointIter,
    Solver,
    SolverStat,
    StopRule,
    check_coupling,
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
        aux: with ``has_aux``, what ``f`` returns beside its image at ``z``.
    """

    z: State
    states: list[State]
    stats: SolverStat
    aux: Any = None


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
    coupled: Coupling = None,
    has_aux: bool = False,
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
        on_failure: what to do about samples that did not converge: ignore, warn or raise; auto
            warns unless the budget was merely spent.
        keep_estimate: return the solver's own estimate, bit for bit, with the gradient of what the
            backward pass attaches beside it; False returns the attached state itself.
        coupled: True if samples depend on each other (nodes of a graph, steps of a chain, batch
            statistics): both solves take the batch as one system with one status. ``"adjoint"``
            solves sample by sample and differentiates as one system. None finds out by one product
            in the backward pass; False says that they do not.
        has_aux: ``f`` returns ``(z, aux)``. The ``aux`` of the returned state comes back; it is
            computed by one evaluation more, at that state, so gradients of ``aux`` are complete.
    """
    check_coupling(coupled, compact)
    if has_aux:
        found = fixed_point(
            without_aux(f), z0, args, solver=solver, backward=backward, stop=stop, record=record,
            compact=compact, on_failure=on_failure, keep_estimate=keep_estimate, coupled=coupled,
        )  # fmt: skip
        return replace(found, aux=aux_at(f, found.z, args))
    packing = Packing(z0)
    packed = packing.wrap(f, args)
    packed.coupled = coupled
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
    if (again or transforms_active()) and ask.compact:
        raise ValueError(
            "compact=True cannot be combined with higher_order=True, torch.func transforms or "
            "forward mode: they need the whole batch again in the backward pass"
        )
    path = _transformed if transforms_active() else _solved
    states, stats = path(f, z0, ask, backward)
    unrolled = not ask.stop.max_iter and not isinstance(backward, Implicit)
    if torch.is_grad_enabled() and not unrolled:
        start = f.packing.split(f.packing.pack(z0))
        states = [unmoved_by(start, tensors) for tensors in states]
    return states, stats


def _solved(f: PackedFn, z0: State, ask: _Ask, backward: Backward) -> States:
    """Solve without a graph, then attach one at the solved states."""
    packing, stop = f.packing, ask.stop
    shine = isinstance(backward, Implicit) and backward.init == "shine"
    if shine and (not isinstance(ask.rule, Broyden) or ask.compact or f.coupled is True):
        raise ValueError(
            "init='shine' reuses the inverse Jacobian of the forward solve: that must be Broyden's "
            f"on the whole batch, got {type(ask.rule).__name__} with compact={ask.compact}, "
            f"coupled={f.coupled}"
        )
    found = solve(
        f.f, z0, ask.rule, stop, [k for k, _ in ask.record], args=f.args, compact=ask.compact,
        on_failure=ask.on_failure, keep_memory=shine, coupled=f.coupled,
    )  # fmt: skip
    if ask.keep_estimate and not torch.is_grad_enabled():
        return [packing.split(packing.pack(found.z))], found.stats
    states: list[list[Tensor]] = []
    for z_k, (_, method) in zip(found.states, ask.record, strict=True):
        states += _attach(method, f, packing.pack(z_k))
    if isinstance(backward, Implicit):
        backward = backward.informed(found)
    # With nothing solved, the start keeps its graph: backpropagation through time reaches it.
    z = packing.pack(found.z if stop.max_iter else z0)
    if not ask.keep_estimate:
        return [*states, *_attach(backward, f, z)], found.stats
    estimate = packing.split(z.detach())
    try:
        attached = _attach(backward, f, z)[-1]
    except NoGraph:  # nothing to differentiate: the estimate is all that was asked for
        return [estimate], found.stats
    return [beside(estimate, attached)], found.stats


def _attach(backward: Backward, f: PackedFn, z: Tensor) -> list[list[Tensor]]:
    """Make a solved state differentiable."""
    if not (isinstance(backward, Implicit) and backward.higher_order and torch.is_grad_enabled()):
        return backward.attach(f, z)
    z = z.detach()
    fz, record = capture(f, z)
    if not any(t.requires_grad for t in record.inputs):
        with torch.enable_grad():  # raises if there are inputs that could not be seen
            record.replay(*record.inputs)(z.clone().requires_grad_())
        return [f.packing.split(fz)]
    z = root(_Solved(record, backward, fz, z), z, *record.inputs)
    return [f.packing.split(z.clone())]  # the caller may write into it


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


def _transformed(f: PackedFn, z0: State, ask: _Ask, backward: Backward) -> States:
    """Solve inside a function transform: everything that `f` uses becomes an input."""
    packing, start = f.packing, f.packing.pack(z0).detach()
    states: list[list[Tensor]] = []
    found = rehearse(f, start)
    # A function transform cannot look into a solve: each sampled state has one of its own.
    samples = () if ask.keep_estimate else ask.record
    for k, method in (*samples, (ask.stop.max_iter, backward)):
        part = ask._replace(stop=replace(ask.stop, max_iter=k), record=())
        F, z = _solve_with_all_inputs(f, start, part, method, found)
        found = F.found
        if isinstance(method, Implicit):
            states.append(packing.split(z.clone()))  # the caller may write into it
        elif ask.stop.max_iter:
            states += method.attach(f, z.detach())
        else:
            states += method.attach(f, packing.pack(z0))
    if ask.keep_estimate and not isinstance(backward, Implicit):
        states = [beside(packing.split(z.detach()), states[-1])]
    return states, F.stats


def _solve_with_all_inputs(
    f: PackedFn, start: Tensor, ask: _Ask, backward: Backward, found: Found
) -> tuple[_Equilibrium, Tensor]:
    """Solve; if a call on the way uses a tensor that no call used before, solve again with it."""
    while True:
        F = _Equilibrium(f, ask, backward, found)
        inputs = list(F.found.values())
        if not F.implicit:  # the backward attaches its own graph
            inputs = [t.detach() for t in inputs]
        try:
            return F, root(F, start, *inputs)
        except LateInputs as late:
            found = found | late.found


class _Adjoined:
    """The adjoint and tangent systems of a map, as its backward pass solves them."""

    def __init__(self, f: PackedFn, method: Implicit) -> None:
        self.f, self.method = f, method
        self.functional = function_transforms_active()

    def solve_affine(self, product: Callable[[Tensor], Tensor], g: Tensor) -> Tensor:
        """Return `u = A u + g` where `product(u) = A u`; `vmap` may have added dimensions."""
        if is_legacy_batched(g):
            return on_all_cotangents(self.solve_affine, product, g)
        problems = g.reshape(prod(g.shape[:-2]), *g.shape[-2:])
        u = solve_adjoint(
            self.method, lambda u: product(u.view(g.shape)).view(problems.shape), problems,
            coupling_of(self.f), self.f.eps,
        )  # fmt: skip
        return u.view(g.shape)


class _Solved(_Adjoined):
    """The operator of a fixed point that is known, with the record of a call there."""

    def __init__(self, record: Capture, method: Implicit, fz: Tensor, z: Tensor) -> None:
        super().__init__(record.f, method)
        self.make, self._answer = record.replay, (fz, z)

    def live(self, *c: Tensor) -> Callable[[Tensor], Tensor]:
        return self.make(*c)

    def solve(self, f: Callable[[Tensor], Tensor], z0: Tensor) -> tuple[Tensor, ...]:
        return self._answer


class _Equilibrium(_Adjoined):
    """The operator of a fixed point inside a function transform: it solves when it is asked.

    Args:
        f: the packed map.
        ask: how to solve.
        backward: implicit differentiation, or one that attaches its own graph afterwards.
        found: the inputs of `f` known so far.
    """

    record: Capture  # of the call at the solved state

    def __init__(self, f: PackedFn, ask: _Ask, backward: Backward, found: Found) -> None:
        self.implicit = isinstance(backward, Implicit)
        super().__init__(f, backward if isinstance(backward, Implicit) else Implicit())
        self.ask, self.found, self.stats = ask, found, SolverStat()
        self._used: frozenset[int] = frozenset()

    def make(self, *c: Tensor) -> Callable[[Tensor], Tensor]:
        return self.record.replay(*c)

    def live(self, *c: Tensor) -> Callable[[Tensor], Tensor]:
        f = LiveFn(self.f, self.found, c)

        def call(z: Tensor) -> Tensor:
            fz = f(z)
            self._used = f.used
            return fz

        return call

    def solve(self, f: Callable[[Tensor], Tensor], z0: Tensor) -> tuple[Tensor, ...]:
        """Solve from `z0`; `vmap` may have removed a dimension or added one."""
        ask, rows = self.ask, z0.reshape(prod(z0.shape[:-1]), z0.shape[-1])
        if self.f.coupled is True:
            rows = z0.reshape(prod(z0.shape[:-2]), z0.shape[-2] * z0.shape[-1])

        def on_rows(z: Tensor) -> Tensor:
            return f(z.view(z0.shape)).reshape(rows.shape)

        found = solve(on_rows, rows, ask.rule, ask.stop, on_failure=ask.on_failure)
        self.stats = found.stats
        z: Tensor = found.z.view(z0.shape)
        if not self.implicit:
            return (z,)
        before = Randomness(z.device)
        fz = f(z)
        drawn = before if before.used else None
        self.record = Capture(self.f, self.found, self._used, ModuleState(self.f.f), drawn)
        return (z,) if ask.keep_estimate else (fz, z)
