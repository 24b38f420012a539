"""Decisions about few samples, as Python numbers: faster than operations on tiny tensors."""

from __future__ import annotations

from array import array
from math import inf, nan
from operator import lt

import torch
from torch import Tensor

from torchdeq.solver.judge import Judge, Pick
from torchdeq.solver.shared_score import FewSharedScore
from torchdeq.stopping import EPS

FEW = 64  # samples


class FewJudge(Judge):
    """A judge whose numbers are lists."""

    def _set_lowest(self, lowest: Tensor) -> None:
        self._values: list[float] = lowest.tolist()
        self._dtype = lowest.dtype
        self._goal, self._eps_rounded = self._rounded([self.goal, EPS])

    def _compare(self, block: Tensor) -> list[Pick]:
        rows = self._measured(block)
        which: list[int] = []
        if len(rows) == 1:
            better = self._improve(rows[0])
        else:
            which, score, ended = choose_list(rows, self._goal)
            better = self._improve(score)
            for i in ended:
                self._values[i] = -inf
        if all(better) and len(set(which)) <= 1:
            return [Pick(which[0] if which else 0, None)]
        which = which or [0] * len(better)
        groups = {k for k, improved in zip(which, better, strict=True) if improved}
        return [
            Pick(k, torch.tensor([b and w == k for w, b in zip(which, better, strict=True)]))
            for k in sorted(groups)
        ]

    def _improve(self, score: list[float]) -> list[bool]:
        """Update the lowest residuals; return which samples improved."""
        lowest, goal, better = self._values, self._goal, []
        if all(map(lt, score, lowest)) and goal < min(score, default=inf):  # the common case
            self._values = list(score)
            return [True] * len(score)
        for i, value in enumerate(score):
            improved = value < lowest[i]  # never true for a NaN
            better.append(improved)
            if improved:
                lowest[i] = value
            if goal and not goal < value < inf:  # within the tolerance, or not finite: finished
                lowest[i] = -inf
        return better

    def _measured(self, block: Tensor) -> list[list[float]]:
        """Return the residuals of K iterates to compare, rounded as `StopRule.measure` does."""
        self._lists = block.tolist()
        if self.stop.rtol is not None and self.goal:
            rows = self.stop.measure(*block).tolist()
        elif self.stop.mode == "rel":
            rows = [self._relative(*pair) for pair in zip(*self._lists, strict=True)]
        else:
            rows = self._lists[0]
        if not self._shared or not (self._values or self._peers.synchronised):
            return rows
        if not isinstance(self._score, FewSharedScore):
            first = torch.tensor(rows[0], dtype=self._dtype)
            self._score = FewSharedScore(first, self.goal, self._peers)
        score = self._score.update_list(rows[0])  # shared iterates come one by one
        self.scores.append(torch.tensor(score, dtype=self._dtype))
        return [score]

    def _relative(self, sizes: list[float], norms: list[float]) -> list[float]:
        """Return the relative residuals of one iterate."""
        allowed = self._rounded([norm + self._eps_rounded for norm in norms])
        pairs = zip(sizes, allowed, strict=True)
        return self._rounded([inf if a == inf else size / a for size, a in pairs])

    def _rounded(self, values: list[float]) -> list[float]:
        """Return numbers in the precision of the residuals, as a tensor would hold them."""
        return values if self._dtype == torch.float64 else array("f", values).tolist()

    def _bounds(self, block: Tensor) -> tuple[float, float]:
        if not self._values:
            return inf, 0.0
        sizes, norms = self._lists
        return min(map(min, sizes)), max(map(max, norms))

    def _lowest_tensor(self) -> Tensor:
        return torch.tensor(self._values, dtype=self._dtype)

    def _lowest_values(self) -> list[float]:
        return self._values.copy()

    def _unfinished(self) -> int:
        return len(self._values) - self._values.count(-inf)


def choose_list(rows: list[list[float]], goal: float) -> tuple[list[int], list[float], list[int]]:
    """Return the iterate that each sample prefers, and its residual; as `judge.choose`.

    The last list has the samples with a residual that is not finite.
    """
    which, score, ended = [], [], []
    for i, values in enumerate(zip(*rows, strict=True)):
        pick, lowest = 0, nan
        for k, value in enumerate(values):
            if not value < inf:
                ended.append(i)
                break
            if not k or value < lowest:
                pick, lowest = k, value
            if value <= goal:
                break
        which.append(pick)
        score.append(lowest)
    return which, score, ended
