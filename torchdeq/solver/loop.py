"""The one loop behind every solver: it counts, watches, records and stops; the rule only steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchdeq.coupling import Coupling, check_coupling
from torchdeq.failures import check_policy, report_failures
from torchdeq.packed import PackedFn
from torchdeq.packing import Packing
from torchdeq.pytree import S, check_batched
from torchdeq.solution import FixedPoint
from torchdeq.solver.base import FixedPointFn, Iterate, Outcome, Problem, Solver
from torchdeq.solver.ledger import Ledger
from torchdeq.stats import SolverStat
from torchdeq.stopping import StopRule
from torchdeq.tracing import untraced

#: Drop finished samples once this fraction of the batch is left; 0.5 to 0.99 cost about the same.
_COMPACT_AT = 0.8


@untraced
@torch.no_grad()
def solve(
    f: Callable[..., Any],
    z0: S,
    solver: Solver[Any],
    stop: StopRule | None = None,
    record: Sequence[int] = (),
    *,
    args: tuple[Any, ...] = (),
    compact: bool = False,
    on_failure: str = "warn",
    coupled: Coupling = None,
    eps: float | None = None,
    shared: bool = False,
) -> FixedPoint[S]:
    """Find a fixed point `z = f(z)` for every sample of a batch, without building a graph.

    Args:
        f: called as `f(z, *args)`, or `f(*z, *args)` for a tuple or list state.
        z0: the start: a tensor, or a tuple, list or dict of tensors, all leading with the batch.
        solver: the update rule and its options.
        stop: budget and tolerance.
        record: evaluations after which the best state so far is returned as well.
        args: further arguments of `f`; needed per sample for `compact`.
        compact: finished samples leave the batch; every tensor in `args` must lead with it.
        on_failure: what to do about samples that did not converge: ignore, warn or raise; auto
            warns, but not about a budget that is spent.
        coupled: True if samples depend on each other (nodes of a graph, steps of a chain, batch
            statistics): the batch is solved as one system with one status.
        eps: the precision of `f` if that is coarser than its dtype and autocast say; a residual
            that cannot fall below it has stalled.
        shared: samples are stepped one by one, but keep the same iterate and stop together: right
            for samples that depend on each other, too.
    """
    check_coupling(coupled, compact)
    packing = Packing(z0)
    packed = PackedFn(packing, f, args, coupled)
    packed.eps = max(packed.eps, eps or 0.0)
    stop = StopRule() if stop is None else stop
    outcome, stats = solve_packed(
        packed, packing.pack(z0), solver, stop, record,
        compact=compact, on_failure=on_failure, shared=shared,
    )  # fmt: skip
    z, *states = (packing.unpack(t) for t in (outcome.z, *outcome.states))
    return FixedPoint(z, states, stats)


@torch.no_grad()
def solve_packed(
    f: PackedFn,
    z0: Tensor,
    solver: Solver[Any],
    stop: StopRule,
    record: Sequence[int] = (),
    *,
    compact: bool = False,
    on_failure: str = "warn",
    scale: Tensor | None = None,
    shared: bool = False,
    keep_memory: bool = False,
) -> tuple[Outcome, SolverStat]:
    """Solve on the packed matrix: the inner solve of `solve`, `fixed_point` and the adjoint.

    Args:
        f: the packed map, which also says whether samples are one coupled system.
        z0: (B, D) the start.
        solver: the update rule.
        stop: budget and tolerance.
        record: evaluations after which the best state so far is returned as well.
        compact: finished samples leave the batch.
        on_failure: what to do about samples that did not converge.
        scale: (B,) the solve divides residuals by it before it compares and reports them.
        shared: all samples keep the same iterate.
        keep_memory: return the memory of the rule too, e.g. Broyden's inverse Jacobian.

    Returns:
        The states, (B, D) each, and the statistics.
    """
    if not isinstance(solver, Solver):
        raise TypeError(
            f"solver must be a Solver such as Anderson(), got {solver!r}; "
            "make_solver(name, options) makes one from a name"
        )
    check_policy(on_failure)
    if any(k != int(k) or k < 0 for k in record):
        raise ValueError(f"record takes whole numbers of evaluations >= 0, got {list(record)}")
    if shared and compact:
        raise ValueError("shared=True keeps the whole batch to the end: drop compact=True")
    if compact:
        check_batched(f.args, f.packing.batch)
    shape, z0 = z0.shape, z0.detach()
    if f.coupled is True:
        f, z0 = f.as_one_system(), z0.reshape(1, -1)
    problem = Problem(
        FixedPointFn(f, stop.max_iter), z0, stop, tuple(record), compact, scale=scale, shared=shared
    )
    with f.autocast.suspended():
        outcome = solver.run(problem, iterate)
    outcome.z, *outcome.states = (t.detach().reshape(shape) for t in (outcome.z, *outcome.states))
    outcome.memory = outcome.memory if keep_memory else None
    trace = outcome.trace.of_each(len(outcome.z)) if f.packing.joint else outcome.trace
    stats = outcome.stats or SolverStat.from_trace(trace, stop, outcome.nfe, f.eps)
    reports = on_failure != "ignore" and solver.watches and stop.goal and stop.max_iter
    if reports and not trace.all_met(stop):
        report_failures(stats, on_failure, "the fixed-point solve")
    return outcome, stats


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
    """Return the memory of the rule for some of the samples."""
    if state is None:
        return None
    if not hasattr(state, "take"):
        raise TypeError(
            f"compact=True needs the memory of {type(solver).__name__} to have take(rows); "
            f"{type(state).__name__} has none"
        )
    return state.take(rows)


class _Recorder:
    """Passes iterates on to the ledger and copies the best state after the recorded evaluations."""

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
        """Return as many states as were asked for; those after the end are the final state."""
        return [self._taken.get(k, final) for k in self.wanted]
