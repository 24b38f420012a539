"""Decisions on the host: which samples improved at a check, and which have finished."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from torchdeq.distributed.peers import ALONE, Peers
from torchdeq.solver.shared_score import SharedScore
from torchdeq.solver.stalls import StallFinder
from torchdeq.stopping import StopRule


class Pick(NamedTuple):
    """Samples that take their best state from one iterate of a check."""

    which: int  # the number of the iterate in the check
    better: Tensor | None  # (b,) flags of the samples, on the host; None for all of them


class Judge:
    """The state of every sample's progress, as tensors of the host.

    A sample keeps its first state within the tolerance and then has finished; so has a sample whose
    residual is NaN or infinite, or that has stalled. Without a tolerance no sample finishes.

    Args:
        stop: the stop rule.
        lowest: (b,) the residuals of the start, on the host; -inf for a sample that has finished.
        eps: returns the precision in which `f` computes.
        shared: whether all samples keep the same iterate.
        peers: the processes whose samples keep the same iterate, too.
    """

    def __init__(
        self,
        stop: StopRule,
        lowest: Tensor,
        eps: Callable[[], float],
        shared: bool,
        peers: Peers = ALONE,
    ) -> None:
        self.stop, self.goal, self._eps, self._shared = stop, stop.goal, eps, shared
        self._peers = peers
        self.running = self._batch = len(lowest)  # unfinished samples, all samples
        self.stalled: Tensor | None = None  # (B,) the iterate at which each stalled, else -1
        self._rows = torch.arange(len(lowest))  # the samples that are still in the batch
        self.scores: list[Tensor] = []  # scores of shared iterates, (b,) each
        self._stalls = StallFinder(stop, lowest)
        self._count = 0  # iterates so far
        self._score: SharedScore | None = None
        self._lowest = lowest
        self._set_lowest(lowest)

    def update(self, block: Tensor) -> list[Pick]:
        """Judge the K iterates of a check by their residuals, (2, K, b); return who improved."""
        if self._shared and block.shape[1] > 1:
            rows = (self.update(block[:, k : k + 1]) for k in range(block.shape[1]))
            return [Pick(k, p.better) for k, picks in enumerate(rows) for p in picks]
        self._count += block.shape[1]
        picks = self._compare(block)
        if self.goal:
            smallest, largest = self._bounds(block)
            if self._stalls.add(block, smallest, largest, self._eps()):
                self._find_stalls()
            self.running = self._unfinished()
        return picks

    @property
    def worst(self) -> float:
        """Return the largest of the lowest residuals of unfinished samples."""
        return float(self._lowest_tensor().amax())

    def unfinished(self) -> Tensor:
        """Return the numbers of the samples that have not finished, on the host."""
        return (self._lowest_tensor() > -inf).nonzero().squeeze(1)

    def keep(self, rows: Tensor) -> None:
        """Judge only some of the samples from now on."""
        self._rows = self._rows[rows]
        self._stalls.keep(rows)
        self._set_lowest(self._lowest_tensor()[rows])

    def _compare(self, block: Tensor) -> list[Pick]:
        """Update the lowest residuals; return who improved."""
        scores = self.stop.measure(*block)  # (K, b)
        if len(scores) > 1:
            which, score = choose(scores, self.goal)
        else:
            scores = self._shared_scores(scores[0])[None]
            which, score = torch.zeros(()), scores[0]
        better = score < self._lowest  # never true for a NaN
        lowest = torch.fmin(self._lowest, score)
        if self.goal:  # the value -inf of a finished sample stays
            lowest = torch.where(continues(scores, self.goal).all(0), lowest, -inf)
        self._lowest = lowest
        return picks_of(which, better)

    def _shared_scores(self, score: Tensor) -> Tensor:
        """Return (b,) the scores of one iterate; of a shared iterate, the worst of the batch."""
        if not self._shared or not (score.numel() or self._peers.synchronised):
            return score
        if self._score is None:
            self._score = SharedScore(score, self.goal, self._peers)
        self.scores.append(self._score.update(score))
        return self.scores[-1]

    def _bounds(self, block: Tensor) -> tuple[float, float]:
        """Return the smallest |g| and the largest |f(z)| of a check."""
        return (float(block[0].amin()), float(block[1].amax())) if block.numel() else (inf, 0.0)

    def _find_stalls(self) -> None:
        """Finish the samples that have stalled."""
        given_up = None if self._score is None else self._score.given_up
        if self._stalls.far and given_up is None:
            self._stalls.skip(self._lowest_values())
            return
        lowest = self._lowest_tensor()
        found = self._stalls.search(given_up) & (lowest > -inf)
        if not bool(found.any()):
            return
        self._set_lowest(torch.where(found, -inf, lowest))
        if self.stalled is None:
            self.stalled = torch.full((self._batch,), -1)
        self.stalled[self._rows[found]] = self._count - 1

    def _set_lowest(self, lowest: Tensor) -> None:
        self._lowest = lowest

    def _lowest_tensor(self) -> Tensor:
        """Return (b,) the lowest residual of each sample; -inf once it has finished."""
        return self._lowest

    def _lowest_values(self) -> Tensor | list[float]:
        """Return the lowest residuals as they are stored; later updates do not change them."""
        return self._lowest

    def _unfinished(self) -> int:
        return int((self._lowest > -inf).sum())


def continues(score: Tensor, goal: float) -> Tensor:
    """Return which residuals do not end the solve of their sample: finite, above the goal."""
    return (score > goal) & (score < inf)


def choose(score: Tensor, goal: float) -> tuple[Tensor, Tensor]:
    """Return (b,) the iterate that each sample prefers among (K, b), and its residual.

    That is the first within the tolerance, or else the lowest; none after a NaN or an infinity.
    """
    score = torch.where((score < inf).cummin(0)[0], score, torch.nan)
    which = torch.where(score <= goal, -1.0, score.nan_to_num(nan=inf)).argmin(0)
    return which, score.gather(0, which[None])[0]


def picks_of(which: Tensor, better: Tensor) -> list[Pick]:
    """Return the picks of the samples that improved, each at its own iterate."""
    if bool(better.all()) and bool((which == which.flatten()[:1]).all()):
        return [Pick(int(which.flatten()[0]), None)] if better.numel() else []
    picks = ((int(k), better & (which == k)) for k in which.unique())
    return [Pick(k, flags) for k, flags in picks if bool(flags.any())]
