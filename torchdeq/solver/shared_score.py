"""The score of an iterate that all samples share: the worst residual of the batch.

Samples that depend on each other must all come from the same iterate, because the residual of one
sample is only valid next to the values that the others had there. The solve gives up a sample whose
residual is not finite or far above all first residuals: this sample keeps its own score and no
longer counts for the others. A sample that has met the goal may rise a little above it again, as
happens at the limit of the precision.
"""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from torchdeq.distributed.peers import ALONE, Peers

_FAR_WORSE = 100.0  # a residual above this multiple of all first residuals will not recover
_TOLERATED = 10.0  # multiple of the goal up to which a sample that has met it may rise again


class SharedScore:
    """The worst residual of the samples that the solve has not given up.

    Args:
        first: (B,) the residuals of the first iterate.
        goal: the residual at which a sample has finished.
        peers: the processes whose samples come from the same iterate, too.
    """

    def __init__(self, first: Tensor, goal: float, peers: Peers = ALONE) -> None:
        self._goal, self._peers = goal, peers
        self._limit = _limit(first)
        self._given_up = torch.zeros_like(first, dtype=torch.bool)
        self._met = self._given_up

    def update(self, score: Tensor) -> Tensor:
        """Return (B,) the scores of the next iterate, from the residual of each sample."""
        self._given_up = self._given_up | ~(score <= self._limit)
        self._met = self._met | (score <= self._goal)
        tolerated = self._met & (score <= _TOLERATED * self._goal)
        worst = torch.where(tolerated, score.clamp(max=self._goal), score)
        worst = torch.where(self._given_up, -inf, worst)
        worst = worst.amax() if worst.numel() else worst.new_tensor(-inf)
        if self._peers.synchronised:
            worst = worst.new_tensor(self._peers.largest([float(worst)])[0])
        return torch.where(self._given_up | (worst == -inf), score, worst)

    @property
    def given_up(self) -> Tensor:
        """Return (B,) which samples the solve has given up."""
        return self._given_up


class FewSharedScore(SharedScore):
    """The shared score of a few samples as Python numbers, which are faster than tiny tensors."""

    def __init__(self, first: Tensor, goal: float, peers: Peers = ALONE) -> None:
        super().__init__(first, goal, peers)
        numbers = torch.stack((self._limit, *first.new_tensor((goal, _TOLERATED * goal))))
        self._limit_number, self._goal_number, self._tolerated = numbers.tolist()
        self._given_up_list = [False] * len(first)
        self._met_list = [False] * len(first)

    @property
    def given_up(self) -> Tensor:
        return torch.tensor(self._given_up_list, dtype=torch.bool)

    def update_list(self, score: list[float]) -> list[float]:
        """Return the scores of the next iterate, from the residual of each sample."""
        given_up, met, goal = self._given_up_list, self._met_list, self._goal_number
        worst = -inf
        for i, value in enumerate(score):
            if given_up[i] or not value <= self._limit_number:
                given_up[i] = True
                continue
            if value <= goal:
                met[i] = True
            elif met[i] and value <= self._tolerated:
                value = goal
            worst = max(worst, value)
        if self._peers.synchronised:
            (worst,) = self._peers.largest([worst])
        return [
            v if lost or worst == -inf else worst for v, lost in zip(score, given_up, strict=True)
        ]


def _limit(first: Tensor) -> Tensor:
    """Return the residual above which the solve gives up a sample."""
    finite = torch.where(first < inf, first, 0.0)
    worst = finite.amax() if finite.numel() else finite.sum()
    return (_FAR_WORSE * worst).clamp_max(torch.finfo(first.dtype).max)  # infinity is never below
