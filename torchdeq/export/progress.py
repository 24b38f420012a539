"""The record of a solve in a graph: best states, residuals and statuses, as tensors of a loop.

The rules are those of the ledger and of `torchdeq.trace`: a sample keeps the first state that meets
the tolerance, or else its best one. The graph records only what these rules need.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import inf

import torch
from torch import Tensor

from torchdeq.export.leaves import Leaves, norm, spread
from torchdeq.numbers import norm_dtype
from torchdeq.solver.judge import continues
from torchdeq.solver.stalls import PATIENCE
from torchdeq.stopping import EPS, Status, StopRule, precision_floor
from torchdeq.trace import GROWTH

Book = dict[str, Tensor]  # (b,) values by name


@dataclass(frozen=True)
class Report:
    """The result of a solve in a graph; one number for each sample.

    Args:
        status: codes of `Status`.
        steps: evaluations up to the returned state.
        residual: of the returned state, in the terms of the tolerance.
        evaluations: calls of `f`, one number for the whole solve.
    """

    status: Tensor
    steps: Tensor
    residual: Tensor
    evaluations: Tensor


@dataclass(frozen=True)
class Progress:
    """The rules by which a solve in a graph compares its iterates.

    Args:
        stop: budget and tolerance.
        joint: whether the batch is one sample.
        eps: machine epsilon of the state.
        root: the divisor of norms for `norm="rms"`, a tensor without dimensions; else None.
    """

    stop: StopRule
    joint: bool
    eps: float
    root: Tensor | None = None

    @property
    def finishes(self) -> bool:
        """Return whether samples finish before the budget is spent."""
        return bool(self.stop.goal)

    @property
    def stalls(self) -> bool:
        """Return whether a sample can be at the limit of its precision and miss the tolerance."""
        if not self.finishes:
            return False
        relative = self.stop.rtol if self.stop.rtol is not None else self.stop.tol
        is_relative = self.stop.mode == "rel" or self.stop.rtol is not None
        return not (is_relative and (relative or 0.0) >= precision_floor(self.eps))

    def start(self, z0: Leaves) -> Book:
        """Return the record before the first evaluation."""
        t = z0[0]
        b = 1 if self.joint or not t.dim() else t.shape[0]
        low = t.new_full((b,), inf, dtype=norm_dtype(t.dtype))
        book = {"low": low, "steps": low.new_zeros((b,), dtype=torch.int64)}
        book |= {"first": low.clone(), "last": low.clone()}
        if self.stop.mode == "abs" or self.stop.rtol is not None:
            book["rel"] = low.clone()
        if self.finishes:
            book["open"] = low > 0
        if self.stalls:
            book |= {"before": low.clone(), "window": low.clone()}
            book |= {"floor": low < 0, "steady": low < 0, "stalled": low < 0}
        return book

    def observe(self, book: Book, k: Tensor, z: Leaves, fz: Leaves) -> tuple[Book, Tensor | None]:
        """Return the record after iterate `k` = 0, 1, ..., and which samples improved.

        None if the last state is the answer, good or bad.
        """
        g = tuple(b - a for a, b in zip(z, fz, strict=True))
        score, rel = self._measure(g, fz)
        new = {"last": score, "first": torch.where(k == 0, score, book["first"])}
        if "rel" in book:
            new["rel"] = rel
        if self.stop.return_final:
            new |= {"low": score.clone(), "steps": book["steps"] + 1}
            return _in_order(new, book), None
        better = score < book["low"]  # never true for a NaN
        if self.finishes:
            better = better & book["open"]
            new["open"] = book["open"] & continues(score, self.stop.goal)
        new["low"] = torch.where(better, score, book["low"])
        new["steps"] = torch.where(better, k + 1, book["steps"])
        if self.stalls:
            self._search_stalls(book, new, k, score, rel)
        return _in_order(new, book), better

    def running(self, book: Book) -> Tensor:
        """Return whether a sample is unfinished."""
        return book["open"].any()

    def report(self, book: Book, k: Tensor, like: Tensor) -> Report:
        """Return the result after `k` evaluations; `like` is a tensor of the state."""
        last, low = book["last"], book["low"]
        grown = (last > GROWTH * book["first"]) & (book.get("rel", last) > self.eps**0.5)
        status = torch.where(grown, int(Status.DIVERGED), int(Status.MAX_ITER))
        finite = last < inf
        if self.finishes:
            finite = finite & book["open"]
        if not self.stop.max_iter:
            finite = torch.ones_like(finite)
        status = torch.where(finite, status, int(Status.NONFINITE))
        if self.stalls:
            status = torch.where(book["stalled"], int(Status.STALLED), status)
        if self.finishes:
            status = torch.where(low <= self.stop.goal, int(Status.CONVERGED), status)
        steps = book["steps"]
        if not self.stop.return_final:  # without a finite residual, the start is the answer
            steps = torch.where(low < inf, steps, 0)
        by_sample = partial(self._by_sample, like=like)
        return Report(by_sample(status), by_sample(steps), by_sample(low), k)

    def report_last(self, before: Leaves, z: Leaves, k: Tensor, tau: float) -> Report:
        """Return the result of an iteration that returns its last state, from its last pair.

        Args:
            before: the state before the last evaluation.
            z: the last state.
            k: evaluations.
            tau: the damping of the iteration.
        """
        g = tuple((b - a) / tau for a, b in zip(before, z, strict=True))
        score, _ = self._measure(g, z)
        status = torch.where(score < inf, int(Status.MAX_ITER), int(Status.NONFINITE))
        if self.finishes:
            status = torch.where(score <= self.stop.goal, int(Status.CONVERGED), status)
        steps = torch.where(score < inf, k, 0)
        by_sample = partial(self._by_sample, like=z[0])
        return Report(by_sample(status), by_sample(steps), by_sample(score), k)

    def take_better(self, better: Tensor | None, answer: Leaves, best: Leaves) -> Leaves:
        """Return the best states: the answers of the samples that improved."""
        if better is None:
            return tuple(t.clone() for t in answer)
        return tuple(
            torch.where(spread(better, new, self.joint), new, old)
            for new, old in zip(answer, best, strict=True)
        )

    def _measure(self, g: Leaves, fz: Leaves) -> tuple[Tensor, Tensor]:
        """Return (b,) the residual that the tolerance limits, and the relative one."""
        wide = norm_dtype(fz[0].dtype)
        # Squares of small numbers underflow; a tolerance that has no absolute part notices.
        tiny = self.stop.rtol is not None and not self.stop.atol
        dtype = torch.float64 if tiny else wide if wide != fz[0].dtype else None
        size, norm_fz = (norm(t, self.joint, dtype) for t in (g, fz))
        if self.root is not None:
            size, norm_fz = size / self.root, norm_fz / self.root
        rel = size / (norm_fz + EPS)
        if self.stop.rtol is not None:
            return self.stop.measure(size, norm_fz).to(wide), rel.to(wide)
        return (rel if self.stop.mode == "rel" else size), rel

    def _search_stalls(self, book: Book, new: Book, k: Tensor, score: Tensor, rel: Tensor) -> None:
        """Finish samples at the limit of their precision that no longer improve."""
        begins, ends = k % PATIENCE == 0, k % PATIENCE == PATIENCE - 1
        before = book["before"]
        window = torch.where(begins, score, torch.minimum(book["window"], score))
        steady = begins | (book["steady"] & (score < book["last"]))
        floor = book["floor"] | (rel <= precision_floor(self.eps))
        gains = (window < 0.9 * before) | (steady & (window < before))
        stalled = ends & new["open"] & floor & ~gains
        new |= {"window": window, "steady": steady, "floor": floor}
        new["before"] = torch.where(ends & (window < before), window, before)
        new["stalled"] = book["stalled"] | stalled
        new["open"] = new["open"] & ~stalled

    def _by_sample(self, value: Tensor, like: Tensor) -> Tensor:
        """Return one value for each row of the batch."""
        return value.expand(like.shape[0]) if self.joint and like.dim() else value


def _in_order(new: Book, book: Book) -> Book:
    """Return a record with the order of another: a loop carries values by their places."""
    return {name: new[name] for name in book}
