"""A chain of solvers: each continues with the samples that the previous one did not solve."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, inf
from typing import ClassVar

import torch
from torch import Tensor

from torchdeq.numbers import HOST
from torchdeq.solver.base import SOLVERS, FixedPointFn, Loop, Outcome, Problem, Solver
from torchdeq.stopping import StopRule
from torchdeq.trace import Trace


@SOLVERS.register("auto")
@dataclass(frozen=True, kw_only=True)
class Auto(Solver[None]):
    """A chain: plain iteration, then Anderson, Broyden and Newton-Krylov for samples that failed.

    Every solver gets an equal part of the remaining budget and starts at the best states so far.
    Samples that have converged keep their states; with `compact=True` they are not evaluated again.
    Without a tolerance no sample counts as solved, and every solver spends its part.

    Args:
        chain: names of the solvers, in order. Each runs with its default options, but without
            forward-mode differentiation, which not every `f` supports.
    """

    chain: tuple[str, ...] = ("fixed_point_iter", "anderson", "broyden", "newton_krylov")
    plans_by_budget: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "chain", tuple(self.chain))
        if not self.chain:
            raise ValueError("chain must name at least one solver, got none")
        for name in self.chain:
            if SOLVERS[name] is Auto:
                raise ValueError(f"auto cannot be part of its own chain: drop it from {self.chain}")
            if not SOLVERS[name].chains:
                raise ValueError(
                    f"{name!r} returns no residuals, so the next solver cannot continue from it: "
                    f"drop it from the chain {self.chain}"
                )

    def run(self, problem: Problem, loop: Loop) -> Outcome:
        stop, f = problem.stop, problem.f
        z, lowest, trace, spent = problem.z0, problem.lowest, None, 0
        states = {k: z for k in problem.record if k == 0}
        for i, name in enumerate(self.chain):
            budget = ceil((stop.max_iter - spent) / (len(self.chain) - i))
            if trace is not None:
                lowest = _lowest(trace, stop)
                if stop.goal:
                    lowest = lowest.to(HOST)  # where the next solver decides, too
                    if not f.any_process(bool((lowest > -inf).any())):
                        break
            if not budget:
                break
            record = [k for k in problem.record if spent < k <= spent + budget]
            stage = _Stage(problem, z, lowest, budget, tuple(k - spent for k in record))
            solver = SOLVERS[name](**SOLVERS[name].options_without_jvp)
            outcome = solver.run(stage.problem, loop)
            z = stage.whole_batch(outcome.z)
            states |= {k: stage.whole_batch(s) for k, s in zip(record, outcome.states, strict=True)}
            part = stage.whole_trace(outcome.trace, trace)
            trace = part if trace is None else trace.followed_by(part, spent)
            spent += outcome.nfe
        if trace is None:
            return loop(SOLVERS[self.chain[0]](), problem)  # the budget is 0
        f.nfe += spent
        return Outcome(z, [states.get(k, z) for k in problem.record], trace, spent)


class _Stage:
    """The problem for one solver of the chain; with compaction, of the unfinished samples only."""

    def __init__(
        self,
        whole: Problem,
        z: Tensor,
        lowest: Tensor | None,
        budget: int,
        record: tuple[int, ...],
    ) -> None:
        self.z, self.rows = z, None
        packed, scale = whole.f.packed, whole.scale
        if whole.compact and lowest is not None:
            unfinished = (lowest > -inf).nonzero().squeeze(1)
            if not len(unfinished):  # other processes go on, and need evaluations of f here
                unfinished = torch.zeros(min(1, len(z)), dtype=torch.long)
            rows = self.rows = unfinished.to(z.device)
            packed, z, lowest = packed.take(rows), z.index_select(0, rows), lowest[unfinished]
            scale = None if scale is None else scale[rows]
        f, stop = FixedPointFn(packed, budget, whole.f.reads), replace(whole.stop, max_iter=budget)
        self.problem = Problem(f, z, stop, record, whole.compact, lowest, scale, whole.shared)

    def whole_batch(self, z: Tensor) -> Tensor:
        """Return the states of the stage together with those of the other samples."""
        return z if self.rows is None else self.z.index_copy(0, self.rows, z)

    def whole_trace(self, trace: Trace, earlier: Trace | None) -> Trace:
        """Return the trace of the stage for the whole batch; other samples keep their values."""
        if self.rows is None or earlier is None:
            return trace
        rows, n = self.rows, len(trace.sizes)
        sizes, norms = (
            old[-1:].expand(n, -1).index_copy(1, rows, new)
            for old, new in ((earlier.sizes, trace.sizes), (earlier.norms, trace.norms))
        )
        stalled = None
        if trace.stalled is not None:
            stalled = trace.stalled.new_full((sizes.shape[1],), -1)
            stalled = stalled.index_copy(0, rows, trace.stalled)
        return Trace(sizes, norms, trace.nfe, stalled)


def _lowest(trace: Trace, stop: StopRule) -> Tensor:
    """Return (B,) the lowest residual of each sample; -inf for those that have finished."""
    score = trace.scores(stop).nan_to_num(nan=inf, posinf=inf).amin(0)
    done = score <= stop.goal if stop.goal else torch.zeros_like(score, dtype=torch.bool)
    if trace.stalled is not None:
        done = done | (trace.stalled >= 0)
    return torch.where(done, -inf, score)
