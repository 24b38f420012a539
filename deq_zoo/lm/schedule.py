"""The published learning rate: a rise, then half a cosine of the whole run."""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, pi

from deq_zoo.optim import Schedule


@dataclass(frozen=True)
class WarmCosine(Schedule):
    """Linear over `warmup` updates, then a cosine that began with the run: it drops a little.

    Args:
        warmup: updates of the rise.
        loud_start: make the first update at the full rate, as the published runs did.
    """

    warmup: int = 0
    loud_start: bool = False

    def factor(self, step: int, steps: int) -> float:
        if step == 0 and self.loud_start:
            return 1.0
        if step < self.warmup:
            return (step if self.loud_start else step + 1) / self.warmup
        return 0.5 * (1 + cos(pi * min(1.0, step / max(1, steps))))
