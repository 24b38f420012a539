"""The one loop behind every solver: it counts, watches, records and stops; the rule only steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from torchdeq.callers import stack_level
from torchdeq.packing import Packing, State, check_batched
from torchdeq.registry import suggest
from torchdeq.solver.base import FixedPointFn, Iterate, Outcome, Problem, Solver
from torchdeq.solver.ledger import Ledger
from torchdeq.solver.stats import SolverStat
from torchdeq.solver.stopping import Status, StopRule
from torchdeq.tracing import untraced

_COMPACT_AT = (
    0.8  # drop finished samples once this share of the batch is left; 0.5 to 0.99 are alike
)
POLICIES = ("ignore", "auto", "warn", "raise")
BACKWARD = "the backward solve"  # how reports call it

#: Whether samples depend on each other: True, False, None (found out in the backward pass), or
#: "adjoint" for maps that are solved sample by sample and differentiated as one system.
Coupling = bool | Literal["adjoint"] | None


def check_coupling(coupled: object, compact: bool) -> None:
    """Raise for a value that says nothing about coupling, and for what coupled samples forbid."""
    if not (coupled is None or isinstance(coupled, bool) or coupled == "adjoint"):
        raise ValueError(f'coupled must be None, True, False or "adjoint", got {coupled!r}')
    if compact and coupled in (True, "adjoint"):
        raise ValueError(
            f"compact=True lets finished samples leave the batch, and coupled={coupled!r} says "
            "that the others depend on them: drop one of them"
        )


class ConvergenceWarning(UserWarning):
    """Some samples of a fixed-point solve did not converge."""


class ConvergenceError(RuntimeError):
    """Some samples did not converge, and ``on_failure="raise"`` was asked for."""


@dataclass(frozen=True)
class Solution:
    """A solved fixed point.

    Args:
        z: the state, in the structure of the start.
        states: the recorded states, as many as were asked for.
        stats: residuals, steps and status of every sample.
        memory: what the rule remembered at the end, if that was asked for.
    """

    z: State
    states: list[State]
    stats: SolverStat
    memory: Any = None


@untraced
@torch.no_grad()
def solve(
    f: Callable[..., State],
    z0: State,
    solver: Solver[Any],
    stop: StopRule | None = None,
    record: Sequence[int] = (),
    *,
    args: tuple[Any, ...] = (),
    compact: bool = False,
    on_failure: str = "warn",
    scale: Tensor | None = None,
    keep_memory: bool = False,
    coupled: Coupling = None,
    eps: float | None = None,
    shared: bool = False,
) -> Solution:
    """Find a fixed point ``z = f(z)`` for every sample of a batch, without building a graph.

    Args:
        f: called as ``f(z, *args)``, or ``f(*z, *args)`` for a tuple or list state.
        z0: the start: a tensor, or a tuple, list or dict of tensors, all leading with the batch.
        solver: the update rule and its options.
        stop: budget and tolerance.
        record: evaluations after which the best state so far is returned as well.
        args: further arguments of ``f``; needed per sample for ``compact``.
        compact: finished samples leave the batch; every tensor in ``args`` must lead with it.
        on_failure: what to do about samples that did not converge: ignore, warn or raise; auto
            warns, but not about a budget that is spent.
        scale: (B,) residuals are divided by it before they are compared and reported.
        keep_memory: return the rule's memory too, e.g. Broyden's inverse Jacobian.
        coupled: True if samples depend on each other (nodes of a graph, steps of a chain, batch
            statistics): the batch is solved as one system with one status.
        eps: the precision of ``f`` if that is coarser than its dtype and autocast say; a residual
            that cannot fall below it has stalled.
        shared: samples are stepped one by one, but keep the same iterate and stop together: right
            for samples that depend on each other, too.
    """
    check_coupling(coupled, compact)
    if shared and compact:
        raise ValueError("shared=True keeps the whole batch to the end: drop compact=True")
    if not isinstance(solver, Solver):
        raise TypeError(
            f"solver must be a Solver such as Anderson(), got {solver!r}; "
            "make_solver(name, options) makes one from a name"
        )
    stop = StopRule() if stop is None else stop
    if on_failure not in POLICIES:
        raise ValueError(f"unknown failure policy {on_failure!r}{suggest(on_failure, POLICIES)}")
    if any(k != int(k) or k < 0 for k in record):
        raise ValueError(f"record takes whole numbers of evaluations >= 0, got {list(record)}")
    packing = Packing(z0, joint=coupled is True)
    if compact:
        check_batched(args, packing.batch)
    f_packed = packing.wrap(f, args)
    f_packed.eps = max(f_packed.eps, eps or 0.0)
    problem = Problem(
        FixedPointFn(f_packed, stop.max_iter),
        packing.pack(z0).detach(),
        stop,
        tuple(record),
        compact,
        scale=scale,
        shared=shared,
    )
    with f_packed.autocast.suspended():
        outcome = solver.run(problem, iterate)
    trace = outcome.trace.of_each(packing.batch) if packing.joint else outcome.trace
    stats = outcome.stats or SolverStat.from_trace(trace, stop, outcome.nfe, f_packed.eps)
    told = on_failure != "ignore" and solver.watches and stop.goal and stop.max_iter
    if told and not trace.all_met(stop):
        report_failures(stats, on_failure, "the fixed-point solve")
    z, *states = (packing.unpack(t.detach()) for t in (outcome.z, *outcome.states))
    return Solution(z, states, stats, outcome.memory if keep_memory else None)


def iterate(solver: Solver[Any], problem: Problem) -> Outcome:
    """Run an update rule until every sample has finished or the budget is spent."""
    f = problem.f
    ledger = Ledger(problem)
    recorder = _Recorder(ledger, problem.record)
    observe = recorder.observe if problem.record else ledger.observe
    state = None
    if f.left:
        it = solver.at(f, problem.z0)
        observe(it, f.nfe)
        state = solver.init(it) if f.left and ledger.running else None
        while f.left and ledger.running:
            if problem.compact and ledger.running <= _COMPACT_AT * len(it.z):
                rows = ledger.compact()
                f.keep(rows)
                it = it.take(rows)
                state = _take(solver, state, rows)
            before = f.nfe
            it, state = solver.step(f, it, state)
            if f.nfe == before:
                raise RuntimeError(f"{type(solver).__name__}.step must evaluate f at least once")
            observe(it, f.nfe)
    z = ledger.snapshot()
    return Outcome(z, recorder.states(z), ledger.trace(), f.nfe, memory=state)


def _take(solver: Solver[Any], state: Any, rows: Tensor) -> Any:
    """The rule's memory of some of the samples."""
    if state is None:
        return None
    if not hasattr(state, "take"):
        raise TypeError(
            f"compact=True needs the memory of {type(solver).__name__} to have take(rows); "
            f"{type(state).__name__} has none"
        )
    return state.take(rows)


class _Recorder:
    """Hands iterates to the ledger and takes a picture of the best state where one is wanted."""

    def __init__(self, ledger: Ledger, wanted: tuple[int, ...]) -> None:
        self.ledger, self.wanted = ledger, wanted
        self._next = sorted(set(wanted), reverse=True)
        self._taken: dict[int, Tensor] = {}

    def observe(self, it: Iterate, nfe: int) -> None:
        self._take(nfe - 1)  # a step of several evaluations may pass a wanted one
        self.ledger.observe(it, nfe)
        self._take(nfe)

    def _take(self, nfe: int) -> None:
        while self._next and self._next[-1] <= nfe:
            self._taken[self._next.pop()] = self.ledger.snapshot()

    def states(self, final: Tensor) -> list[Tensor]:
        """As many as were asked for; those after the end are the final state."""
        return [self._taken.get(k, final) for k in self.wanted]


def report_failures(stats: SolverStat, policy: str, what: str) -> None:
    """Warn or raise if a sample failed.

    The text of a warning carries no numbers, so that Python shows it once per call site; an error
    carries them.

    Args:
        stats: of the solve.
        policy: warn, raise, or auto. The latter warns, but takes it for normal that a forward solve
            spends its budget, and that its residual grew after a good state, which is returned.
        what: how the text calls the solve; `BACKWARD` is the one that is not a forward solve.
    """
    codes = [Status(code) for code in stats.status.tolist()]
    failed = sorted({code for code in codes if code.failed})
    if policy == "auto" and what != BACKWARD:
        failed = [code for code in failed if code > Status.DIVERGED]
        if Status.DIVERGED in codes and bool(_useless(stats).any()):
            failed.insert(0, Status.DIVERGED)
    if not failed or bool((stats["abs_lowest"] < 0).any()):  # -1: a solver that does not tell
        return
    told = "; ".join(f"{code.name}: {code.sentence}" for code in failed)
    hint = "allow more evaluations, loosen the tolerance, damp f or choose another solver"
    if policy == "raise":
        raise ConvergenceError(
            f"{what} failed for some samples: {stats.summary()} ({told}); {hint}"
        )
    warnings.warn(
        f"{what} did not converge for some samples ({told}); {hint}; the statistics say which, "
        'on_failure="ignore" silences this',
        ConvergenceWarning,
        stacklevel=stack_level(),
    )


def _useless(stats: SolverStat) -> Tensor:
    """(B,) whether a sample diverged without ever having halved its first residual."""
    diverged = stats.status == int(Status.DIVERGED)
    return diverged & ~(stats["abs_lowest"] < 0.5 * stats["abs_trace"][:, 0])
