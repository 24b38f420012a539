"""Stalls: samples at the limit of their precision that no longer improve."""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from torchdeq.stopping import StopRule, precision_floor

PATIENCE = 4  # checks without a 10 % gain before a residual at the precision floor has stalled


class StallFinder:
    """The search for stalls, on the host, once every `PATIENCE` checks.

    Args:
        stop: the stop rule.
        lowest: (b,) the residuals of the start, or infinity.
    """

    def __init__(self, stop: StopRule, lowest: Tensor) -> None:
        self._stop = stop
        self._previous_lowest: Tensor | list[float] = lowest  # (b,) at the last search
        self._dtype = lowest.dtype
        self._at_floor = torch.zeros_like(lowest, dtype=torch.bool)
        self._recent: list[Tensor] = []  # residuals of the checks since then, (2, K, b) each
        self._floor = 0.0
        self.far = True  # whether all residuals so far were above the floor: nothing has stalled

    def add(self, block: Tensor, smallest: float, largest: float, eps: float) -> bool:
        """Add the residuals of a check; return whether a search is due.

        Args:
            block: (2, K, b) $|g|$ and $|f(z)|$.
            smallest: the smallest $|g|$ of the block.
            largest: the largest $|f(z)|$ of the block.
            eps: the precision in which `f` computes.
        """
        self._recent.append(block)
        self._floor = precision_floor(eps)
        self.far = self.far and smallest > self._floor * largest
        return len(self._recent) == PATIENCE

    def skip(self, lowest: Tensor | list[float]) -> None:
        """Do without a search while all residuals are far from the floor.

        Args:
            lowest: (b,) the lowest residual of each unfinished sample so far.
        """
        self._recent, self._previous_lowest = [], lowest

    def search(self, given_up: Tensor | None = None) -> Tensor:
        """Return (b,) which samples have stalled.

        A sample has stalled if it is at the floor and has gained less than 10 % since the last
        search. Slow but steady progress is never a stall.

        Args:
            given_up: (b,) samples that do not count, if all samples share one iterate.
        """
        recent, self._recent = self._recent, []
        size, norm = torch.cat(recent, dim=1)
        score = self._stop.measure(size, norm)
        rel = size / norm.clamp_min(torch.finfo(norm.dtype).tiny)
        if given_up is not None:
            score, rel = (_spread(t, given_up) for t in (score, rel))
        window_lowest, before = score.amin(0), self._previous()
        # Below all earlier values, too: an orbit may fall in each window and jump in between.
        steady = (score.diff(dim=0) < 0).all(0) & (window_lowest < before)
        self._at_floor = self._at_floor | (rel.amin(0) <= self._floor)
        self._previous_lowest = torch.fmin(before, window_lowest)
        return self._at_floor & ~(window_lowest < 0.9 * before) & ~steady

    def keep(self, rows: Tensor) -> None:
        """Keep only some of the samples."""
        self._previous_lowest, self._at_floor = self._previous()[rows], self._at_floor[rows]
        self._recent = [block[:, :, rows] for block in self._recent]

    def _previous(self) -> Tensor:
        """Return (b,) the lowest residuals at the last search."""
        return torch.as_tensor(self._previous_lowest, dtype=self._dtype)


def _spread(t: Tensor, given_up: Tensor) -> Tensor:
    """Return (N, b) the largest value of each row at every sample but those given up.

    A sample that the solve has given up keeps its own value: it is not at the floor because others
    are, or because none is left.
    """
    if not t.numel():  # this process has no samples
        return t
    worst = torch.where(given_up, -inf, t).amax(1, keepdim=True)
    return torch.where(given_up, t, worst)
