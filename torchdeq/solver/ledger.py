"""The ledger of a solve: residuals, best state and progress of each sample."""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from torchdeq import numbers
from torchdeq.numbers import in_range, row_norm
from torchdeq.solver.base import Iterate, Problem
from torchdeq.solver.shared_score import HostSharedScore, SharedScore
from torchdeq.stopping import precision_floor
from torchdeq.trace import Trace

_DEFER = 32  # iterates to compare at once if the solve decides nothing in between
_SMALL = 1 << 13  # numbers in a state; keeping many larger states costs more (cache) than it saves
_FEW, _VERY_FEW = 256, 64  # samples
_PATIENCE = 4  # checks without a 10 % gain before a residual at the precision floor has stalled


class Ledger:
    """The record of a solve, with the state that the solve will return for each sample.

    That is the first state that meets the tolerance; if none does, the state with the lowest
    residual; if no residual is finite, the start. With a tolerance, each check reads two numbers
    from the device; without a tolerance, nothing is read.
    """

    def __init__(self, problem: Problem) -> None:
        z0, stop, lowest = problem.z0, problem.stop, problem.lowest
        dtype = torch.promote_types(z0.dtype, torch.float32)  # of residuals
        self.stop, self.goal = stop, stop.goal
        self.running = len(z0)  # unfinished samples, as of the last check
        self.best = z0
        self._f, self._scale, self._shared = problem.f, problem.scale, problem.shared
        if stop.norm == "rms":
            root = z0.new_full(z0.shape[:1], stop.length(z0.shape[1]), dtype=dtype)
            self._scale = root if self._scale is None else root * self._scale
        self._batch = len(z0)
        defers = not (self.goal or stop.return_final or self._shared) and self._scale is None
        self._defers = defers and z0.numel() <= _SMALL
        self._every = stop.check_every if self.goal else _DEFER if self._defers else 1
        # (b,) the lowest residual so far; -inf once a sample has finished.
        self._lowest = z0.new_full(z0.shape[:1], inf, dtype=dtype) if lowest is None else lowest
        self._finished = self._lowest.new_full((), -inf)  # created once, not at each check
        self._index = torch.arange(len(z0), device=z0.device)
        self._spare = self._index.new_full((), len(z0))
        self._buffer: Tensor | None = None  # (b + 1, D): the best states and a spare row
        self._pending: list[Iterate] = []
        self._residuals: list[tuple[Tensor, Tensor] | None] = []  # their |g| and |f(z)|, (b,)
        self._sizes: list[Tensor] = []  # |g| by iterate, (b,)
        self._norms: list[Tensor] = []  # |f(z)| by iterate, (b,)
        # On the host, Python counts a few numbers faster than torch.
        self._few_on_host = len(z0) <= _FEW and numbers.reads_are_free(z0.device)
        self._shared_score: SharedScore | None = None
        self._scores: list[Tensor] = []  # scores of shared iterates, (b,)
        self._checks = 0
        self._nfe: list[int] = []
        self._previous_lowest = self._lowest  # (b,) at the last search for stalls
        self._lowest_relative = torch.full_like(self._lowest, inf)
        self._stalled: Tensor | None = None  # (B,) the iterate at which a sample stalled, else -1
        # Set once samples have left the batch:
        self._whole_best: Tensor | None = None  # (B, D) the best states when they left
        self._rows: Tensor | None = None  # (b,) the samples that are still in the batch
        self._earlier: Tensor | None = None  # (2, N, B) the residuals until then

    def observe(self, it: Iterate, nfe: int) -> None:
        """Record an iterate that is available after `nfe` evaluations."""
        self._nfe.append(nfe)
        if self._every == 1:
            self._compare(*self._measure(it), it.fz if it.x is None else it.x, it.fresh)
            return
        self._pending.append(it)
        later = self._defers and it.g is None  # one norm of many rows costs less than many norms
        measure = self._measure_roughly if self._defers else self._measure
        self._residuals.append(None if later else measure(it))
        if len(self._pending) >= self._every or not it.fresh:
            self.flush()

    def flush(self) -> None:
        """Compare the pending iterates with the best states."""
        if not self._pending:
            return
        pending, residuals = self._pending, self._residuals
        self._pending, self._residuals = [], []
        if any(residuals):
            measured = [r or self._measure(it) for r, it in zip(residuals, pending, strict=True)]
            size, norm = (torch.stack(ts) for ts in zip(*measured, strict=True))
        rough = self._defers and self._few_on_host
        if not any(residuals) or (rough and not (in_range(size) and in_range(norm))):
            z, fz = (torch.stack(ts) for ts in zip(*(it[:2] for it in pending), strict=True))
            size, norm = row_norm(fz - z), row_norm(fz)
        answers = [it.fz if it.x is None else it.x for it in pending]
        if len(pending) == 1 or self._shared:
            for row in zip(size, norm, answers, (it.fresh for it in pending), strict=True):
                self._compare(*row)
        else:
            self._compare_many(size, norm, answers)

    def snapshot(self) -> Tensor:
        """Return the best state so far of every sample, (B, D), which later steps do not change."""
        self.flush()
        if self._whole_best is None or self._rows is None:
            return self.best if self._buffer is None else self.best.clone()
        return self._whole_best.index_copy(0, self._rows, self.best)

    def compact(self) -> Tensor:
        """Drop the finished samples from the batch; return the rows of those that stay."""
        self._whole_best = self.snapshot()
        self._earlier = self._history()
        self._sizes, self._norms = [], []
        rows = (self._lowest > -inf).nonzero().squeeze(1)
        self._rows = rows if self._rows is None else self._rows[rows]
        self.best, self._buffer = self.best.index_select(0, rows), None
        self._lowest, self._previous_lowest = self._lowest[rows], self._previous_lowest[rows]
        self._lowest_relative = self._lowest_relative[rows]
        self._scale = None if self._scale is None else self._scale[rows]
        self._index = self._index[: len(rows)]
        self._spare = self._index.new_full((), len(rows))
        return rows

    def trace(self) -> Trace:
        """Return the trace, (N, B); samples that left the batch keep their last values."""
        sizes, norms = self._history()
        shared_scores = torch.stack(self._scores) if self._scores else None
        return Trace(sizes, norms, self._nfe, self._stalled, shared_scores)

    def _history(self) -> Tensor:
        """Return |g| and |f(z)| of the whole batch so far, (2, N, B)."""
        earlier = self._earlier
        if not self._sizes:
            return self._lowest.new_empty(2, 0, self._batch) if earlier is None else earlier
        rows = torch.stack((*self._sizes, *self._norms))
        new = rows.view(2, len(self._sizes), -1)  # (2, K, b)
        if earlier is None or self._rows is None:
            return new
        last = earlier[:, -1:].expand(-1, new.shape[1], -1)
        return torch.cat((earlier, last.index_copy(2, self._rows, new)), dim=1)

    def _measure(self, it: Iterate) -> tuple[Tensor, Tensor]:
        """Return |g| and |f(z)|, (b,), divided by the scale of each sample."""
        size, norm = row_norm(it.residual), row_norm(it.fz)
        return (size, norm) if self._scale is None else (size / self._scale, norm / self._scale)

    def _measure_roughly(self, it: Iterate) -> tuple[Tensor, Tensor]:
        """Return |g| and |f(z)| by plain norms; `flush` checks the range of many norms at once."""
        if it.fz.dtype.itemsize < 4 or not self._few_on_host:
            return self._measure(it)
        return tuple(torch.linalg.vector_norm(t, dim=-1) for t in (it.residual, it.fz))

    def _score(self, size: Tensor, norm: Tensor) -> Tensor:
        """Return (b,) the residuals to compare; of a shared iterate, the worst of the batch."""
        score = self.stop.measure(size, norm)
        if not self._shared or not score.numel():
            return score
        if self._shared_score is None:
            few = self._few_on_host and len(score) <= _VERY_FEW
            self._shared_score = (HostSharedScore if few else SharedScore)(score, self.goal)
        self._scores.append(self._shared_score.update(score))
        return self._scores[-1]

    def _compare(self, size: Tensor, norm: Tensor, answer: Tensor, fresh: bool) -> None:
        """Compare one iterate with the best state of each sample."""
        self._sizes.append(size)
        self._norms.append(norm)
        if self.stop.return_final:
            self.best = answer if fresh else answer.clone()
            return
        score = self._score(size, norm)
        if self.goal:
            self._check(score, answer, fresh)
        else:
            better = score < self._lowest  # never true for a NaN
            self._lowest = torch.fmin(self._lowest, score)
            self._overwrite(better, answer)

    def _compare_many(self, size: Tensor, norm: Tensor, answers: list[Tensor]) -> None:
        """Compare K iterates, with residuals (K, b); the solver has overwritten no answer yet."""
        self._sizes.extend(size.unbind(0))
        self._norms.extend(norm.unbind(0))
        score = self.stop.measure(size, norm)
        if self.goal:  # the first within the tolerance, else the best; none after a NaN
            score = torch.where((score < inf).cummin(0)[0], score, torch.nan)
            which = torch.where(score <= self.goal, -1.0, score.nan_to_num(nan=inf)).argmin(0)
            rows = torch.add(self._index, which, alpha=len(self._index))
            answer = torch.cat(answers).index_select(0, rows)
            self._check(score.gather(0, which[None])[0], answer, True)
        else:
            lower = torch.where(score < self._lowest, score, inf)
            self._lowest, which = torch.cat((self._lowest[None], lower)).min(0)
            rows = torch.add(self._index, which, alpha=len(self._index))
            self.best = torch.cat((self.best, *answers)).index_select(0, rows)

    def _check(self, score: Tensor, answer: Tensor, fresh: bool) -> None:
        """Keep each sample at its first state within the tolerance; count unfinished samples."""
        better = score < self._lowest
        # Within the tolerance or NaN: finished. The value -inf of a finished sample stays.
        lowest = torch.fmin(self._lowest, score)
        self._lowest = torch.where(score > self.goal, lowest, self._finished)
        self._checks += 1
        if self._checks % _PATIENCE == 0:
            self._find_stalls()
        improved, self.running = self._counts(better)
        if improved == len(better) and fresh:
            self.best, self._buffer = answer, None
        elif improved:
            self._overwrite(better, answer)

    def _counts(self, better: Tensor) -> tuple[int, int]:
        """Return how many samples improved and how many are unfinished; one read of the device."""
        if self._few_on_host:
            lowest = self._lowest.tolist()
            return sum(better.tolist()), len(lowest) - lowest.count(-inf)
        improved, running = torch.stack((better, self._lowest > -inf)).sum(1).tolist()
        return improved, running

    def _overwrite(self, better: Tensor, answer: Tensor) -> None:
        """Replace the best states of some samples.

        Rows that are not better are copied into a spare row: this takes two thirds of the time of
        `torch.where` with a broadcast mask, and the host reads no row numbers.
        """
        b = len(better)
        if self._buffer is None:
            self._buffer = self.best.new_empty(b + 1, answer.shape[1])
            self._buffer[:b] = self.best
            self.best = self._buffer[:b]
        self._buffer.index_copy_(0, torch.where(better, self._index, self._spare), answer)

    def _find_stalls(self) -> None:
        """Finish the samples that have stalled.

        A sample has stalled if it is at the precision floor and has gained less than 10 % in
        `_PATIENCE` checks. Slow but steady progress is never a stall.
        """
        recent = _PATIENCE * self._every
        size, norm = (torch.stack(rows[-recent:]) for rows in (self._sizes, self._norms))
        score = self.stop.measure(size, norm)
        rel = size / norm.clamp_min(torch.finfo(norm.dtype).tiny)
        if self._shared_score is not None:
            score, rel = (self._shared_score.spread(t) for t in (score, rel))
        lowest, before = score.amin(0), self._previous_lowest
        # Below all earlier values, too: an orbit may fall in each window and jump in between.
        steady = (score.diff(dim=0) < 0).all(0) & (lowest < before)
        self._lowest_relative = torch.fmin(self._lowest_relative, rel.amin(0))
        at_floor = self._lowest_relative <= precision_floor(self._f.packed.eps)
        stalled = (self._lowest > -inf) & at_floor & ~(lowest < 0.9 * before) & ~steady
        self._previous_lowest = torch.fmin(before, lowest)
        self._lowest = torch.where(stalled, self._finished, self._lowest)
        if self._stalled is None:
            self._stalled = self._index.new_full((self._batch,), -1)
        rows = slice(None) if self._rows is None else self._rows
        self._stalled[rows] = torch.where(stalled, len(self._nfe) - 1, self._stalled[rows])
