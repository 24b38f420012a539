"""Decisions about few samples, as Python numbers: faster than operations on tiny tensors."""

from __future__ import annotations

from array import array
from math import inf

import torch
from torch import Tensor

from torchdeq.solver.judge import Judge, Pick, choose, picks_of
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
        if block.shape[1] == 1:
            better = self._improve(self._measured(block))
            if all(better):
                return [Pick(0, None)]
            return [Pick(0, torch.tensor(better))] if any(better) else []
        which, score = choose(self.stop.measure(*block), self.goal)
        better = self._improve(score.tolist())
        return picks_of(which, torch.tensor(better, dtype=torch.bool))

    def _improve(self, score: list[float]) -> list[bool]:
        """Update the lowest residuals; return which samples improved."""
        lowest, goal, better = self._values, self._goal, []
        for i, value in enumerate(score):
            improved = value < lowest[i]  # never true for a NaN
            better.append(improved)
            if improved:
                lowest[i] = value
            if goal and not value > goal:  # within the tolerance or NaN: finished
                lowest[i] = -inf
        return better

    def _measured(self, block: Tensor) -> list[float]:
        """Return the residuals of one iterate to compare, rounded as `StopRule.measure` does."""
        sizes, norms = self._lists = block[:, 0].tolist()
        if self.stop.rtol is not None and self.goal:
            score = self.stop.measure(*block[:, 0]).tolist()
        elif self.stop.mode == "rel":
            allowed = self._rounded([norm + self._eps_rounded for norm in norms])
            pairs = zip(sizes, allowed, strict=True)
            score = self._rounded([inf if a == inf else size / a for size, a in pairs])
        else:
            score = sizes
        if not self._shared or not score:
            return score
        if not isinstance(self._score, FewSharedScore):
            self._score = FewSharedScore(torch.tensor(score, dtype=self._dtype), self.goal)
        score = self._score.update_list(score)
        self.scores.append(torch.tensor(score, dtype=self._dtype))
        return score

    def _rounded(self, values: list[float]) -> list[float]:
        """Return numbers in the precision of the residuals, as a tensor would hold them."""
        return values if self._dtype == torch.float64 else array("f", values).tolist()

    def _bounds(self, block: Tensor) -> tuple[float, float]:
        if block.shape[1] > 1 or not self._values:
            return super()._bounds(block)
        sizes, norms = self._lists
        return min(sizes), max(norms)

    def _lowest_tensor(self) -> Tensor:
        return torch.tensor(self._values, dtype=self._dtype)

    def _unfinished(self) -> int:
        return len(self._values) - self._values.count(-inf)
