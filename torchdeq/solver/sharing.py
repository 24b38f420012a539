"""One iterate for all samples: what decides about it is the worst of the batch.

Samples that may depend on each other must not be put together from several iterates: the residual
of one was measured beside the others as they were then. A sample that is far worse than any was at
first, or not finite, is given up: it keeps its own score, and no other waits for it. One that has
met the goal may wander a little above it, as it does at the floor of its precision.
"""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

_FAR_WORSE = 100.0  # a residual that exceeds the first ones by so much will not come back
_WANDER = 10.0  # how far above the goal a sample may be that has met it once


class Sharing:
    """What decides about iterates that all samples share.

    Args:
        first: (B,) the residuals of the first iterate.
        goal: the residual at which a sample is done.
    """

    def __init__(self, first: Tensor, goal: float) -> None:
        self._goal = goal
        self._limit = _limit(first)
        self._lost = torch.zeros_like(first, dtype=torch.bool)
        self._met = self._lost

    def judge(self, score: Tensor) -> Tensor:
        """Return (B,) what decides about the next iterate."""
        self._lost = self._lost | ~(score <= self._limit)
        self._met = self._met | (score <= self._goal)
        wanders = self._met & (score <= _WANDER * self._goal)
        worst = torch.where(wanders, score.clamp(max=self._goal), score)
        worst = torch.where(self._lost, -inf, worst).amax()
        return torch.where(self._lost | (worst == -inf), score, worst)

    def spread(self, t: Tensor) -> Tensor:
        """Return (N, B) the largest number of each iterate in place of every sample's own."""
        return torch.where(self._lost, -inf, t).amax(1, keepdim=True).expand_as(t)


class HostSharing(Sharing):
    """The same for a few samples on the host, where Python's own numbers are quickest."""

    def __init__(self, first: Tensor, goal: float) -> None:
        super().__init__(first, goal)
        self._most = float(self._limit)
        self._lost_by_sample = [False] * len(first)
        self._met_by_sample = [False] * len(first)

    def judge(self, score: Tensor) -> Tensor:
        lost, met, goal = self._lost_by_sample, self._met_by_sample, self._goal
        values, worst = score.tolist(), -inf
        for i, value in enumerate(values):
            if lost[i] or not value <= self._most:
                lost[i] = True
                continue
            if value <= goal:
                met[i] = True
            elif met[i] and value <= _WANDER * goal:
                value = goal
            worst = max(worst, value)
        if not any(lost):
            return torch.full_like(score, worst)
        self._lost = torch.tensor(lost)
        return torch.where(self._lost, score, worst)


def _limit(first: Tensor) -> Tensor:
    """Return the residual above which a sample is given up."""
    return _FAR_WORSE * torch.where(first < inf, first, 0.0).amax()
