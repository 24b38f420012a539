"""The loop behind every solver: it counts evaluations, keeps the best states, records and stops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchdeq import numbers
from torchdeq.coupling import Coupling, check_coupling
from torchdeq.distributed.peers import find_peers
from torchdeq.failures import check_policy, report_failures
from torchdeq.packed import PackedFn
from torchdeq.packing import Packing
from torchdeq.pytree import S, check_batched
from torchdeq.solution import FixedPoint
from torchdeq.solver.base import FixedPointFn, Iterate, Outcome, Problem, Solver
from torchdeq.solver.device_ledger import DeviceLedger, defers
from torchdeq.solver.host_ledger import HostLedger
from torchdeq.solver.ledger import Ledger
from torchdeq.stats import SolverStat, untraced_solve
from torchdeq.stopping import StopRule
from torchdeq.tracing import graph_solver

#: Drop finished samples once at most this fraction of the batch is unfinished; 0.5 to 0.99 cost
#: about the same.
_COMPACT_AT = 0.8


@untraced_solve
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
        z0: the start: a tensor, or a tuple, list or dict of tensors whose first dimension is the
            batch.
        solver: the update rule with its options.
        stop: budget and tolerance.
        record: evaluations after which to record the best state so far.
        args: further arguments of `f`.
        compact: finished samples leave the batch; the first dimension of every tensor in `args`
            must be the batch.
        on_failure: how to report samples that did not converge: `"ignore"`, `"warn"`, `"raise"`, or
            `"auto"`, which warns, but not about a spent budget.
        coupled: True if samples depend on each other (nodes of a graph, steps of a chain, batch
            statistics): the solver treats the batch as one system with one status.
        eps: the machine epsilon of the precision in which `f` computes, if that is coarser than its
            dtype and autocast say. A residual at this limit has stalled.
        shared: all samples keep the same iterate and stop together, while the solver steps each
            sample on its own. Correct for samples that depend on each other, too.
    """
    check_coupling(coupled, compact)
    in_graph = graph_solver()
    if in_graph is not None:
        exported: FixedPoint[S] = in_graph(
            f, z0, args, solver=solver, stop=stop, record=record, keep_estimate=True,
            coupled=coupled, eps=eps, shared=shared,
        )  # fmt: skip
        return exported
    packing = Packing(z0)
    packed = PackedFn(packing, f, args, coupled)
    packed.eps = max(packed.eps, eps or 0.0)
    stop = StopRule() if stop is None else stop
    packed.peers = find_peers(f, stop.sync_stop, packing.device)
    with packed.peers.forward():
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
        f: the packed map, which also says whether samples are one coupled system, and which
            processes evaluate it together.
        z0: (B, D) the start.
        solver: the update rule with its options.
        stop: budget and tolerance.
        record: evaluations after which to record the best state so far.
        compact: finished samples leave the batch.
        on_failure: how to report samples that did not converge.
        scale: (B,) divisors of the residuals, applied before comparisons and reports.
        shared: all samples keep the same iterate.
        keep_memory: return the state of the solver after its last step, too, e.g. Broyden's inverse
            Jacobian.

    Returns:
        The states, (B, D) each, and the statistics.
    """
    _check_request(solver, record, compact, shared)
    check_policy(on_failure)
    if compact:
        check_batched(f.args, f.packing.batch)
    shape, z0 = z0.shape, z0.detach()
    if f.coupled is True:
        f, z0 = f.as_one_system(), z0.reshape(1, -1)
    reads = bool(stop.goal) or numbers.reads_are_free(z0.device)
    problem = Problem(
        FixedPointFn(f, stop.max_iter, reads),
        z0,
        stop,
        tuple(record),
        compact,
        scale=scale,
        shared=shared,
    )
    with f.autocast.suspended():
        outcome = solver.run(problem, iterate)
    outcome.z, *outcome.states = (t.detach().reshape(shape) for t in (outcome.z, *outcome.states))
    outcome.memory = outcome.memory if keep_memory else None
    trace = outcome.trace.expand(len(outcome.z)) if f.packing.joint else outcome.trace
    stats = outcome.stats or SolverStat.from_trace(trace, stop, outcome.nfe, f.eps)
    reports = on_failure != "ignore" and solver.watches and stop.goal and stop.max_iter
    raises_together = on_failure == "raise" and f.peers.synchronised
    if reports and (raises_together or not trace.all_converged(stop)):
        report_failures(stats, on_failure, "the fixed-point solve", f.peers)
    return outcome, stats


def _check_request(solver: object, record: Sequence[int], compact: bool, shared: bool) -> None:
    """Raise for an argument that is not a solver, bad numbers to record, and clashing options."""
    if not isinstance(solver, Solver):
        raise TypeError(
            f"solver must be a Solver such as Anderson(), got {solver!r}; "
            "make_solver(name, options) builds a solver from its name"
        )
    if any(k != int(k) or k < 0 for k in record):
        raise ValueError(f"record takes whole numbers of evaluations >= 0, got {list(record)}")
    if shared and compact:
        raise ValueError("shared=True keeps the whole batch to the end: drop it, or compact=True")


def iterate(solver: Solver[Any], problem: Problem) -> Outcome:
    """Run an update rule until every sample has finished or the budget is spent."""
    f = problem.f
    ledger = open_ledger(problem)
    recorder = _Recorder(ledger, problem.record)
    observe = recorder.observe if problem.record else ledger.observe
    state = None
    if f.left:
        it = solver.at(f, problem.z0)
        observe(it, f.nfe)
        it = it._replace(moderate=ledger.moderate)
        state = solver.init(it) if f.left and ledger.going else None
        while f.left and ledger.going:
            if problem.compact and 0 < ledger.running <= _COMPACT_AT * len(it.z):
                rows = ledger.compact()
                f.keep(rows)
                it = it.take(rows)
                state = _take(solver, state, rows)
            before = f.nfe
            last = [it]  # popped, so that a step can free the memory of the last iterate
            del it
            it, state = solver.step(f, last.pop(), state)
            if f.nfe == before:
                raise RuntimeError(f"{type(solver).__name__}.step must evaluate f at least once")
            observe(it, f.nfe)
    z = ledger.snapshot()
    return Outcome(z, recorder.states(z), ledger.trace(), f.nfe, memory=state)


def open_ledger(problem: Problem) -> Ledger:
    """Return the ledger of a solve: the host decides where it reads residuals in any case."""
    free = numbers.reads_are_free(problem.z0.device) and not problem.stop.return_final
    on_host = bool(problem.stop.goal) or (free and not defers(problem))
    return HostLedger(problem) if on_host else DeviceLedger(problem)


def _take(solver: Solver[Any], state: Any, rows: Tensor) -> Any:
    """Return the state of the solver for some of the samples."""
    if state is None:
        return None
    if not hasattr(state, "take"):
        raise TypeError(
            f"compact=True needs a state of {type(solver).__name__} with take(rows); "
            f"{type(state).__name__} has none"
        )
    return state.take(rows)


class _Recorder:
    """A wrapper of a ledger that records the best states after given numbers of evaluations."""

    def __init__(self, ledger: Ledger, record: tuple[int, ...]) -> None:
        self.ledger, self.record = ledger, record
        self._remaining = sorted(set(record), reverse=True)
        self._recorded: dict[int, Tensor] = {}

    def observe(self, it: Iterate, nfe: int) -> None:
        """Pass an iterate to the ledger and record the states that are due."""
        self._record_until(nfe - 1)  # a step of several evaluations may pass one of the numbers
        self.ledger.observe(it, nfe)
        self._record_until(nfe)

    def _record_until(self, nfe: int) -> None:
        while self._remaining and self._remaining[-1] <= nfe:
            self._recorded[self._remaining.pop()] = self.ledger.snapshot()

    def states(self, final: Tensor) -> list[Tensor]:
        """Return the recorded states; numbers that the solve did not reach get the final state."""
        return [self._recorded.get(k, final) for k in self.record]
