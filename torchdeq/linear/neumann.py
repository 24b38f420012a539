"""The Neumann series: plain iteration on a linear system."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from torchdeq.linear.base import LINEAR, LinearSolver, System


@LINEAR.register("neumann")
@dataclass(frozen=True, kw_only=True)
class Neumann(LinearSolver):
    r"""Truncated Neumann series.

    .. math:: x_{k+1} = x_k + (b - A x_k), \qquad x_k = \sum_{i<k} (I - A)^i b

    Converges if the spectral radius of :math:`I - A` is below 1. No memory beyond two states. Each
    system keeps the first sum within its tolerance, else the one with the lowest residual.
    """

    def run(self, system: System, x0: Tensor | None) -> Tensor:
        x, r = system.start(x0)
        size = torch.linalg.vector_norm(r, dim=1)
        system.note(size)
        best, bar = x, torch.where(system.solved(size), -inf, size)
        while system.left and not (system.checks and bool((bar == -inf).all())):
            x = x + r
            r = system.b - system.product(x)
            size = torch.linalg.vector_norm(r, dim=1)
            system.note(size)
            better = size < bar
            best = torch.where(better[:, None], x, best)
            bar = torch.where(better, torch.where(system.solved(size), -inf, size), bar)
        return best
