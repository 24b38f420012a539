"""The Neumann series: plain iteration on a linear system."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from torchdeq.linear.base import LINEAR, LinearSolver
from torchdeq.linear.system import System

_PATIENCE = 4  # sums without a 10 % gain after which a residual at the floor has stalled


@LINEAR.register("neumann")
@dataclass(frozen=True, kw_only=True)
class Neumann(LinearSolver):
    r"""Truncated Neumann series.

    $$x_{k+1} = x_k + (b - A x_k), \qquad x_k = \sum_{i<k} (I - A)^i b$$

    The series converges if the spectral radius of $I - A$ is below 1. The memory is two states.
    Each system returns the first sum within its tolerance, otherwise the sum with the lowest
    residual.
    """

    def run(self, system: System) -> Tensor:
        x, r = system.start()
        size = system.norm(r)
        system.record(size)
        best, lowest = x, torch.where(system.over(size), -inf, size)  # -inf: finished
        previous_lowest, recent = size, []
        while system.left and not (system.checks and system.every(lowest == -inf)):
            x = r if r is system.b else x + r  # the first sum of a zero start is b itself
            r = system.b - system.product(x)
            size = system.norm(r)
            system.record(size)
            better = size < lowest  # False for NaN
            best = torch.where(better[:, None], x, best)
            lowest = torch.fmin(lowest, size)
            if not system.checks:
                continue
            lowest = torch.where(system.over(size), -inf, lowest)
            recent.append(size)
            if len(recent) == _PATIENCE:
                sizes, recent = torch.stack(recent), []
                recent_lowest = sizes.amin(0)
                steady = (sizes.diff(dim=0) < 0).all(0) & (recent_lowest < previous_lowest)
                idle = ~(recent_lowest < 0.9 * previous_lowest) & ~steady
                stalled = idle & (lowest > -inf) & system.at_floor(recent_lowest, system.norm(x))
                system.stall(stalled)
                lowest = torch.where(stalled, -inf, lowest)
                previous_lowest = torch.fmin(previous_lowest, recent_lowest)
        return best
