"""Traces: the residuals of every iterate of a solve, and the statistics computed from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from torchdeq.stopping import Status, StopRule, relative

GROWTH = 10.0  # a sample whose residual ends above this multiple of its first one has diverged


@dataclass(frozen=True)
class Trace:
    """The raw record of a solve: one row per iterate, one column per sample."""

    sizes: Tensor  # (N, B): |f(z) - z|
    norms: Tensor  # (N, B): |f(z)|
    nfe: Sequence[int]  # evaluations spent up to each iterate
    stalled: Tensor | None = None  # (B,) the row at which each sample stalled, else -1
    shared_scores: Tensor | None = None  # (N, B) scores, if all samples keep the same iterate

    def scores(self, stop: StopRule) -> Tensor:
        """Return (N, B) the residuals by which the solve compared iterates."""
        if self.shared_scores is not None:
            return self.shared_scores
        return stop.measure(self.sizes, self.norms)

    def all_converged(self, stop: StopRule) -> bool:
        """Return whether every sample met the tolerance at some iterate; reads the device."""
        met = self.scores(stop) <= stop.goal
        return bool((met.any(0) & self.sizes.isfinite().all(0)).all())

    def expand(self, batch: int) -> Trace:
        """Return the trace of one coupled system as a trace of each of its samples."""
        stalled = None if self.stalled is None else self.stalled.expand(batch)
        scores = None if self.shared_scores is None else self.shared_scores.expand(-1, batch)
        sizes, norms = (t.expand(-1, batch) for t in (self.sizes, self.norms))
        return Trace(sizes, norms, self.nfe, stalled, scores)

    def followed_by(self, later: Trace, spent: int) -> Trace:
        """Return this trace and that of a second solve of the same samples as one trace.

        Residuals of this trace that are not finite become the largest finite number: the second
        solve has started these samples again.

        Args:
            later: the trace of the second solve.
            spent: evaluations of the first solve.
        """
        shared_scores = None
        if self.shared_scores is not None and later.shared_scores is not None:
            shared_scores = _join_finite(self.shared_scores, later.shared_scores)
        return Trace(
            _join_finite(self.sizes, later.sizes),
            torch.cat((self.norms, later.norms)),
            [*self.nfe, *(spent + n for n in later.nfe)],
            _join_stalled(self, later),
            shared_scores,
        )


def summarise(trace: Trace, stop: StopRule, eps: float) -> tuple[dict[str, Tensor], Tensor]:
    """Return the statistics by key and the status of each sample, without reading the device.

    Args:
        trace: the residuals of a solve.
        stop: its stop rule.
        eps: machine epsilon of the precision in which `f` computes.
    """
    if not len(trace.sizes):
        return _summarise_nothing(trace.sizes)
    score = trace.scores(stop).nan_to_num(nan=inf, posinf=inf)  # (N, B)
    met = (score <= stop.goal) if stop.goal else torch.zeros_like(score, dtype=torch.bool)
    last, stalled = _last_iterates(trace, stop, score, met)
    after = torch.arange(len(score), device=score.device)[:, None] > last
    best = last if stop.return_final else torch.where(after, inf, score).argmin(0)
    finite = _pick(score, best) < inf
    converged = _pick(met, last)
    if trace.shared_scores is not None and stop.goal:
        # The worst sample chose this iterate; others may meet their own tolerance there.
        own = (stop.measure(trace.sizes, trace.norms) <= stop.goal) & ~after
        converged |= _pick(own, best) & finite
    rel = relative(trace.sizes, trace.norms)
    abs_lowest, rel_lowest = _pick(trace.sizes, best), _pick(rel, best)
    steps = torch.tensor(trace.nfe, dtype=rel.dtype).to(rel.device)
    values = {
        "abs_lowest": abs_lowest,
        "rel_lowest": rel_lowest,
        "abs_trace": torch.where(after, abs_lowest, trace.sizes).mT,
        "rel_trace": torch.where(after, rel_lowest, rel).mT,
        # If no residual is finite, the solve has returned the start.
        "nstep": steps[best] if stop.return_final else torch.where(finite, steps[best], 0.0),
    }
    status = torch.where(stalled, int(Status.STALLED), _failure(score, rel, last, eps))
    return values, torch.where(converged, int(Status.CONVERGED), status).to(torch.int8)


def _summarise_nothing(sizes: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Return the statistics and statuses of a solve without evaluations."""
    lowest = sizes.new_full(sizes.shape[1:], inf)
    values = {"abs_lowest": lowest, "rel_lowest": lowest, "nstep": torch.zeros_like(lowest)}
    status = torch.full_like(lowest, int(Status.MAX_ITER), dtype=torch.int8)
    return values | {"abs_trace": sizes.mT, "rel_trace": sizes.mT}, status


def _last_iterates(
    trace: Trace, stop: StopRule, score: Tensor, met: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (B,) the row at which each sample ended, and (B,) whether it stalled there.

    A sample ends at its first iterate that meets the tolerance or is not finite, or where it
    stalled. The solve goes on for other samples, but the later rows of a sample that ended do not
    count.
    """
    ends = met | (score == inf) if stop.goal else met
    last = torch.where(ends.any(0), ends.int().argmax(0), len(score) - 1)
    if trace.stalled is None:
        return last, torch.zeros_like(ends[0])
    stalled = (trace.stalled >= 0) & (trace.stalled <= last)
    return torch.where(stalled, trace.stalled, last), stalled


def _failure(score: Tensor, rel: Tensor, last: Tensor, eps: float) -> Tensor:
    """Return (B,) the status of each sample in case it neither converged nor stalled."""
    final = _pick(score, last)
    # Growth below the square root of the precision is noise around a good state.
    grown = (final > GROWTH * score[0]) & (_pick(rel, last) > eps**0.5)
    status = torch.where(grown, int(Status.DIVERGED), int(Status.MAX_ITER))
    return torch.where(final < inf, status, int(Status.NONFINITE))


def _pick(values: Tensor, rows: Tensor) -> Tensor:
    """Return (B,) one value of each column of (N, B), at the given rows."""
    return values.gather(0, rows[None])[0]


def _join_finite(first: Tensor, later: Tensor) -> Tensor:
    """Return the residuals of two solves; the residuals of the first solve become finite."""
    largest = torch.finfo(first.dtype).max
    return torch.cat((first.nan_to_num(nan=largest, posinf=largest), later))


def _join_stalled(first: Trace, later: Trace) -> Tensor | None:
    """Return the rows of the joint trace at which samples stalled; the second solve wins."""
    if later.stalled is None:
        return first.stalled
    moved = torch.where(later.stalled < 0, -1, later.stalled + len(first.sizes))
    return moved if first.stalled is None else torch.where(moved < 0, first.stalled, moved)
