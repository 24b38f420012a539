"""The ledger without a tolerance: all decisions on the device, and the host reads nothing."""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from torchdeq import numbers
from torchdeq.numbers import in_range, row_norm
from torchdeq.solver.base import SMALL, Iterate, Problem
from torchdeq.solver.ledger import Ledger
from torchdeq.solver.residual_history import as_block, measure, measure_safely
from torchdeq.solver.shared_score import SharedScore

_DEFER = 32  # iterates to compare at once: the solve decides nothing in between


def defers(problem: Problem) -> bool:
    """Return whether comparisons can wait: nothing depends on them, and states are small."""
    waits = not (problem.stop.goal or problem.stop.return_final or problem.shared)
    return waits and problem.z0.numel() <= SMALL


class DeviceLedger(Ledger):
    """A ledger for solves without a tolerance, and for those that return their last state."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem, _DEFER if defers(problem) else 1)
        z0, self._stop = problem.z0, problem.stop
        lowest = problem.lowest
        if lowest is None:
            lowest = z0.new_full(z0.shape[:1], inf, dtype=self._history.dtype)
        self._lowest = lowest  # (b,) the lowest residual so far
        self._shared = problem.shared
        self._score: SharedScore | None = None
        self._scores: list[Tensor] = []  # scores of shared iterates, (b,) each
        self._free = numbers.reads_are_free(z0.device)

    def _measure(self, it: Iterate) -> Tensor | None:
        if self._every > 1 and it.g is None and it.square is None:
            return None  # one norm of many rows costs less than many norms
        return measure(it) if self._free else measure_safely(it)

    def _compare(self, pending: list[Iterate], measured: list[Tensor | None]) -> None:
        late = all(row is None for row in measured)
        if not late:
            rows = zip(measured, pending, strict=True)
            measured = [measure_safely(it) if row is None else row for row, it in rows]
        block = torch.empty(0) if late else as_block(measured).to(self._history.dtype)
        if late or (self._free and not in_range(block)):
            z, fz = (torch.stack(ts) for ts in zip(*(it[:2] for it in pending), strict=True))
            block = torch.stack((row_norm(fz - z), row_norm(fz)))
        self._history.append(block)
        if self._stop.return_final:
            self._best.adopt(pending[-1])
            return
        scale = self._history.scale
        score = self._stop.measure(*(block if scale is None else block / scale))  # (K, b)
        if len(pending) > 1:
            lower = torch.where(score < self._lowest, score, inf)
            self._lowest, which = torch.cat((self._lowest[None], lower)).min(0)
            self._best.choose([it.answer for it in pending], which)
            return
        row = self._shared_score(score[0]) if self._shared else score[0]
        better = row < self._lowest  # never true for a NaN
        self._lowest = torch.fmin(self._lowest, row)
        self._best.replace_where(better, pending[0].answer)

    def _shared_score(self, score: Tensor) -> Tensor:
        """Return (b,) the worst residual of the batch."""
        if not score.numel():
            return score
        if self._score is None:
            self._score = SharedScore(score, 0.0)
        self._scores.append(self._score.update(score))
        return self._scores[-1]

    def _shared_scores(self) -> list[Tensor]:
        return self._scores
