"""The learning rate of DEQ-Flow's training."""

from __future__ import annotations

from dataclasses import dataclass

from deq_zoo.optim import Schedule


@dataclass(frozen=True)
class LinearOneCycle(Schedule):
    """PyTorch's one-cycle policy with straight lines.

    Args:
        rise: share of the steps in which the rate rises.
        start: rate of the first step, relative to the highest.
        end: rate of the last one, relative to the first.
        extra: steps that the cycle is longer than training.
    """

    rise: float = 0.05
    start: float = 1 / 25
    end: float = 1e-4
    extra: int = 100

    def factor(self, step: int, steps: int) -> float:
        last = steps + self.extra - 1
        top = self.rise * (steps + self.extra) - 1
        if step <= top:
            return self.start + (1 - self.start) * step / max(top, 1e-9)
        low = self.start * self.end
        return 1 + (low - 1) * min(1.0, (step - top) / max(last - top, 1e-9))
