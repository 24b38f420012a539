"""A chain of solvers: each takes on the samples that the one before could not finish."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Any

import torch
from torch import Tensor

from torchdeq.solver.base import SOLVERS, FixedPointFn, Loop, Outcome, Problem, Solver
from torchdeq.stats import Trace
from torchdeq.stopping import StopRule

#: A chain takes any f, so its Newton must not depend on forward-mode differentiation.
_OPTIONS: dict[str, dict[str, Any]] = {"newton_krylov": {"jacobian": "difference"}}


@SOLVERS.register("auto")
@dataclass(frozen=True, kw_only=True)
class Auto(Solver[None]):
    """Plain iteration, then Anderson, Broyden and Newton-Krylov for the samples that failed.

    Every solver gets an equal share of what is left of the budget and starts where the one before
    was best. Samples that have converged keep their states; with ``compact=True`` they are not
    evaluated again either. Without a tolerance nobody ever succeeds, and every solver has its
    share.

    Args:
        chain: names of the solvers, in order; each runs with its default options, Newton with
            finite differences, which any ``f`` allows.
    """

    chain: tuple[str, ...] = ("fixed_point_iter", "anderson", "broyden", "newton_krylov")

    def __post_init__(self) -> None:
        object.__setattr__(self, "chain", tuple(self.chain))
        if not self.chain:
            raise ValueError("the chain needs at least one solver")
        for name in self.chain:
            if SOLVERS[name] is Auto:
                raise ValueError("auto cannot be part of its own chain")
            if not SOLVERS[name].chains:
                raise ValueError(f"{name!r} leaves no residuals, so a chain cannot go on from it")

    def run(self, problem: Problem, loop: Loop) -> Outcome:
        stop, f = problem.stop, problem.f
        z, bar, trace, spent = problem.z0, problem.bar, None, 0
        states = {k: z for k in problem.record if k == 0}
        for i, name in enumerate(self.chain):
            share = ceil((stop.max_iter - spent) / (len(self.chain) - i))
            if trace is not None:
                bar = _bar(trace, stop)
                if stop.goal and not bool((bar > -inf).any()):
                    break
            if not share:
                break
            wanted = [k for k in problem.record if spent < k <= spent + share]
            stage = _Stage(problem, z, bar, share, tuple(k - spent for k in wanted))
            outcome = SOLVERS[name](**_OPTIONS.get(name, {})).run(stage.problem, loop)
            z = stage.everybody(outcome.z)
            states |= {k: stage.everybody(s) for k, s in zip(wanted, outcome.states, strict=True)}
            part = stage.full_trace(outcome.trace, trace)
            trace = part if trace is None else trace.then(part, spent)
            spent += outcome.nfe
        if trace is None:
            return loop(SOLVERS[self.chain[0]](), problem)  # nothing to spend
        f.nfe += spent
        return Outcome(z, [states.get(k, z) for k in problem.record], trace, spent)


class _Stage:
    """One solver's share of the work; with compaction, on the samples that still need it."""

    def __init__(
        self, whole: Problem, z: Tensor, bar: Tensor | None, share: int, record: tuple[int, ...]
    ) -> None:
        self.z, self.rows = z, None
        packed = whole.f.f
        if whole.compact and bar is not None:
            self.rows = (bar > -inf).nonzero().squeeze(1)
            packed, z, bar = packed.take(self.rows), z.index_select(0, self.rows), bar[self.rows]
        f, stop = FixedPointFn(packed, share), replace(whole.stop, max_iter=share)
        scale = whole.scale
        if scale is not None and self.rows is not None:
            scale = scale[self.rows]
        self.problem = Problem(f, z, stop, record, whole.compact, bar, scale, whole.shared)

    def everybody(self, z: Tensor) -> Tensor:
        """The stage's states among those of the samples it did not touch."""
        return z if self.rows is None else self.z.index_copy(0, self.rows, z)

    def full_trace(self, trace: Trace, before: Trace | None) -> Trace:
        """The stage's record for the whole batch; other samples keep their last values."""
        if self.rows is None or before is None:
            return trace
        rows, n = self.rows, len(trace.sizes)
        sizes, norms = (
            old[-1:].expand(n, -1).index_copy(1, rows, new)
            for old, new in ((before.sizes, trace.sizes), (before.norms, trace.norms))
        )
        stalled = None
        if trace.stalled is not None:
            nobody = trace.stalled.new_full((sizes.shape[1],), -1)
            stalled = nobody.index_copy(0, rows, trace.stalled)
        return Trace(sizes, norms, trace.nfe, stalled)


def _bar(trace: Trace, stop: StopRule) -> Tensor:
    """(B,) the residual each sample has reached; -inf for those that need no other solver."""
    score = trace.scores(stop).nan_to_num(nan=inf, posinf=inf).amin(0)
    done = score <= stop.goal if stop.goal else torch.zeros_like(score, dtype=torch.bool)
    if trace.stalled is not None:
        done = done | (trace.stalled >= 0)
    return torch.where(done, -inf, score)
