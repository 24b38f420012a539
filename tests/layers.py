"""A layer whose equilibrium the tests of DEQ modules compute."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests import problems
from torchdeq.deq import CORES

DOUBLE = torch.float64
BUILT_IN = list(CORES)  # the cores that the library registers itself


class Layer(nn.Module):
    """The map `tanh(W z + x)` with its input `x` and start `z0`; it counts its calls."""

    def __init__(self, gain: float = 0.6) -> None:
        super().__init__()
        self.W = nn.Parameter(problems.contraction(gain, 6))
        self.x = torch.randn(3, 6, dtype=DOUBLE, generator=torch.Generator().manual_seed(1))
        self.z0 = torch.zeros(3, 6, dtype=DOUBLE)
        self.calls = 0

    def forward(self, z: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(z @ self.W.mT + self.x)

    def iterate(self, steps: int) -> Tensor:
        z = self.z0
        for _ in range(steps):
            z = torch.tanh(z @ self.W.mT + self.x)
        return z
