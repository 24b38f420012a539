"""Per-sample bookkeeping of a solve: residuals, the best state, who is still running."""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from torchdeq import numbers
from torchdeq.numbers import in_range, row_norm
from torchdeq.solver.base import Iterate, Problem
from torchdeq.solver.sharing import HostSharing, Sharing
from torchdeq.stats import Trace
from torchdeq.stopping import precision_floor

_DEFER = 32  # iterates judged at once when nothing has to be decided in between
_TINY = 1 << 13  # numbers in a state; above, keeping many alive costs more (cache) than it saves
_FEW, _VERY_FEW = 256, 64  # samples
_PATIENCE = 4  # checks without a 10 % gain before a residual at the precision floor has stalled


class Ledger:
    """Watches iterates and keeps, for each sample, the state that the solve will return.

    That is the first state within the tolerance; failing that, the one with the lowest residual;
    the start, if no residual was finite. With a tolerance two numbers per check are read from a
    device, without one nothing.
    """

    def __init__(self, problem: Problem) -> None:
        z0, stop, bar = problem.z0, problem.stop, problem.bar
        dtype = torch.promote_types(z0.dtype, torch.float32)  # of residuals
        self.stop, self.goal = stop, stop.goal
        self.running = len(z0)  # samples that have not finished, as far as the host knows
        self.best = z0
        self._f, self._scale, self._shared = problem.f, problem.scale, problem.shared
        if stop.norm == "rms":
            root = z0.new_full(z0.shape[:1], stop.length(z0.shape[1]), dtype=dtype)
            self._scale = root if self._scale is None else root * self._scale
        self._batch = len(z0)
        defers = not (self.goal or stop.return_final or self._shared) and self._scale is None
        self._tiny = defers and z0.numel() <= _TINY
        self._every = stop.check_every if self.goal else _DEFER if self._tiny else 1
        # The bar is the residual to beat: -inf once a sample has finished.
        self._bar = z0.new_full(z0.shape[:1], inf, dtype=dtype) if bar is None else bar
        self._done = self._bar.new_full((), -inf)  # scalars would be made anew at every call
        self._index = torch.arange(len(z0), device=z0.device)
        self._spare = self._index.new_full((), len(z0))
        self._buffer: Tensor | None = None  # (b + 1, D): the best states, and a row to throw away
        self._pending: list[Iterate] = []
        self._residuals: list[tuple[Tensor, Tensor] | None] = []  # |g| and |f(z)| of those, (b,)
        self._sizes: list[Tensor] = []  # |g| by iterate, (b,)
        self._norms: list[Tensor] = []  # |f(z)| by iterate, (b,)
        # On the host a few numbers are counted more quickly as Python's own.
        self._lists = len(z0) <= _FEW and numbers.reads_are_free(z0.device)
        self._sharing: Sharing | None = None
        self._scores: list[Tensor] = []  # what decided about shared iterates, (b,)
        self._checks = 0
        self._nfe: list[int] = []
        self._low = self._bar
        self._low_rel = torch.full_like(self._bar, inf)
        self._stalled: Tensor | None = None  # (B,) the iterate at which a sample stalled, else -1
        # Once samples have left the batch: everybody's best state, who is here, and the trace so
        # far.
        self._all: Tensor | None = None
        self._here: Tensor | None = None
        self._past: list[Tensor] = []  # (2, N, B)

    def observe(self, it: Iterate, nfe: int) -> None:
        """Take note of an iterate that was known after ``nfe`` evaluations."""
        self._nfe.append(nfe)
        if self._every == 1:
            self._judge(*self._measure(it), it.fz if it.x is None else it.x, it.fresh)
            return
        self._pending.append(it)
        later = self._tiny and it.g is None  # many small norms cost less at once
        measure = self._measure_roughly if self._tiny else self._measure
        self._residuals.append(None if later else measure(it))
        if len(self._pending) >= self._every or not it.fresh:
            self.flush()

    def flush(self) -> None:
        """Decide about the iterates seen since the last time."""
        if not self._pending:
            return
        pending, residuals = self._pending, self._residuals
        self._pending, self._residuals = [], []
        if any(residuals):
            known = [r or self._measure(it) for r, it in zip(residuals, pending, strict=True)]
            size, norm = (torch.stack(ts) for ts in zip(*known, strict=True))
        rough = self._tiny and self._lists
        if not any(residuals) or (rough and not (in_range(size) and in_range(norm))):
            z, fz = (torch.stack(ts) for ts in zip(*(it[:2] for it in pending), strict=True))
            size, norm = row_norm(fz - z), row_norm(fz)
        answers = [it.fz if it.x is None else it.x for it in pending]
        if len(pending) == 1 or self._shared:
            for row in zip(size, norm, answers, (it.fresh for it in pending), strict=True):
                self._judge(*row)
        else:
            self._judge_many(size, norm, answers)

    def snapshot(self) -> Tensor:
        """The best state so far of every sample, (B, D), safe from later steps."""
        self.flush()
        if self._all is None or self._here is None:
            return self.best if self._buffer is None else self.best.clone()
        return self._all.index_copy(0, self._here, self.best)

    def compact(self) -> Tensor:
        """Let the finished samples go; returns the rows of those that stay."""
        self._all = self.snapshot()
        self._past = [self._history()]
        self._sizes, self._norms = [], []
        rows = (self._bar > -inf).nonzero().squeeze(1)
        self._here = rows if self._here is None else self._here[rows]
        self.best, self._buffer = self.best.index_select(0, rows), None
        self._bar, self._low, self._low_rel = self._bar[rows], self._low[rows], self._low_rel[rows]
        self._scale = None if self._scale is None else self._scale[rows]
        self._index = self._index[: len(rows)]
        self._spare = self._index.new_full((), len(rows))
        return rows

    def trace(self) -> Trace:
        """The raw record, (N, B); samples that left the batch keep their last values."""
        sizes, norms = self._history()
        shared = torch.stack(self._scores) if self._scores else None
        return Trace(sizes, norms, self._nfe, self._stalled, shared)

    def _history(self) -> Tensor:
        """|g| and |f(z)| of everybody so far, (2, N, B)."""
        if not self._sizes:
            return self._past[0] if self._past else self._bar.new_empty(2, 0, self._batch)
        rows = torch.stack((*self._sizes, *self._norms))
        new = rows.view(2, len(self._sizes), -1)  # (2, K, b)
        if self._here is None:
            return new
        old = self._past[0]
        gone = old[:, -1:].expand(-1, new.shape[1], -1)
        everybody = gone.index_copy(2, self._here, new)
        return torch.cat((old, everybody), dim=1)

    def _measure(self, it: Iterate) -> tuple[Tensor, Tensor]:
        size, norm = row_norm(it.residual), row_norm(it.fz)
        return (size, norm) if self._scale is None else (size / self._scale, norm / self._scale)

    def _measure_roughly(self, it: Iterate) -> tuple[Tensor, Tensor]:
        """The same, whose range is looked at for many iterates at once."""
        if it.fz.dtype.itemsize < 4 or not self._lists:
            return self._measure(it)
        return tuple(torch.linalg.vector_norm(t, dim=-1) for t in (it.residual, it.fz))

    def _score(self, size: Tensor, norm: Tensor) -> Tensor:
        """What decides about an iterate; of a shared one, the worst of the batch."""
        score = self.stop.measure(size, norm)
        if not self._shared or not score.numel():
            return score
        if self._sharing is None:
            few = self._lists and len(score) <= _VERY_FEW
            self._sharing = (HostSharing if few else Sharing)(score, self.goal)
        self._scores.append(self._sharing.judge(score))
        return self._scores[-1]

    def _judge(self, size: Tensor, norm: Tensor, answer: Tensor, fresh: bool) -> None:
        """One iterate: is it the best of some sample, or all it needs?"""
        self._sizes.append(size)
        self._norms.append(norm)
        if self.stop.return_final:
            self.best = answer if fresh else answer.clone()
            return
        score = self._score(size, norm)
        if self.goal:
            self._check(score, answer, fresh)
        else:
            better = score < self._bar  # never true for a NaN
            self._bar = torch.fmin(self._bar, score)
            self._overwrite(better, answer)

    def _judge_many(self, size: Tensor, norm: Tensor, answers: list[Tensor]) -> None:
        """The same for (K, b) residuals of K iterates whose answers are all still there."""
        self._sizes.extend(size.unbind(0))
        self._norms.extend(norm.unbind(0))
        score = self.stop.measure(size, norm)
        if self.goal:  # the first within the tolerance, else the best of them; none after a NaN
            score = torch.where((score < inf).cummin(0)[0], score, torch.nan)
            which = torch.where(score <= self.goal, -1.0, score.nan_to_num(nan=inf)).argmin(0)
            rows = torch.add(self._index, which, alpha=len(self._index))
            answer = torch.cat(answers).index_select(0, rows)
            self._check(score.gather(0, which[None])[0], answer, True)
        else:
            lower = torch.where(score < self._bar, score, inf)
            self._bar, which = torch.cat((self._bar[None], lower)).min(0)
            rows = torch.add(self._index, which, alpha=len(self._index))
            self.best = torch.cat((self.best, *answers)).index_select(0, rows)

    def _check(self, score: Tensor, answer: Tensor, fresh: bool) -> None:
        """Capture each sample at its own convergence, and count who goes on."""
        better = score < self._bar
        # Within the tolerance, or not a number: finished. A finished bar stays at -inf.
        self._bar = torch.where(score > self.goal, torch.fmin(self._bar, score), self._done)
        self._checks += 1
        if self._checks % _PATIENCE == 0:
            self._look_for_stalls()
        gained, self.running = self._counts(better)
        if gained == len(better) and fresh:
            self.best, self._buffer = answer, None
        elif gained:
            self._overwrite(better, answer)

    def _counts(self, better: Tensor) -> tuple[int, int]:
        """How many samples gained, and how many go on; one transfer from a device."""
        if self._lists:
            bar = self._bar.tolist()
            return sum(better.tolist()), len(bar) - bar.count(-inf)
        gained, running = torch.stack((better, self._bar > -inf)).sum(1).tolist()
        return gained, running

    def _overwrite(self, better: Tensor, answer: Tensor) -> None:
        """Replace the best states of some samples.

        Copying rows, with those not wanted sent to a spare one, costs two thirds of ``torch.where``
        on a broadcast mask and needs no number on the host.
        """
        b = len(better)
        if self._buffer is None:
            self._buffer = self.best.new_empty(b + 1, answer.shape[1])
            self._buffer[:b] = self.best
            self.best = self._buffer[:b]
        self._buffer.index_copy_(0, torch.where(better, self._index, self._spare), answer)

    def _look_for_stalls(self) -> None:
        """At the floor of the precision, wandering, and no 10 % gain in four checks.

        Progress that is slow but steady is never a stall.
        """
        recent = _PATIENCE * self._every
        size, norm = (torch.stack(rows[-recent:]) for rows in (self._sizes, self._norms))
        score = self.stop.measure(size, norm)
        rel = size / norm.clamp_min(torch.finfo(norm.dtype).tiny)
        if self._sharing is not None:
            score, rel = (self._sharing.spread(t) for t in (score, rel))
        low = score.amin(0)
        # Lower than ever, too: an orbit may fall within each window, and jump between them.
        steady = (score.diff(dim=0) < 0).all(0) & (low < self._low)
        self._low_rel = torch.fmin(self._low_rel, rel.amin(0))
        floor = precision_floor(self._f.f.eps)
        stalled = (self._bar > -inf) & (self._low_rel <= floor) & ~(low < 0.9 * self._low) & ~steady
        self._low = torch.fmin(self._low, low)
        self._bar = torch.where(stalled, self._done, self._bar)
        if self._stalled is None:
            self._stalled = self._index.new_full((self._batch,), -1)
        here = slice(None) if self._here is None else self._here
        self._stalled[here] = torch.where(stalled, len(self._nfe) - 1, self._stalled[here])
