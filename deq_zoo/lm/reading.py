"""Reading a text: what each token cost, and what more evaluations of f are worth."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, inf
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from deq_zoo.lm.data import Streams
from deq_zoo.lm.model import DEQTransformer, Memory, Output
from torchdeq import SolverStat


class Reading:
    """A text read from its beginning, segment by segment; what it cost.

    Args:
        model: in evaluation mode.
        memory: tokens remembered.
        device: of the model.
        **call: options of the DEQ's calls.
    """

    def __init__(self, model: nn.Module, memory: int, device: torch.device, **call: Any) -> None:
        self.model, self.most, self.device, self.call = unwrapped(model), memory, device, call
        self.count = 0
        self._sum = torch.zeros((), dtype=torch.float64)
        self._memory: Memory | None = None

    def __call__(self, ids: Tensor, target: Tensor) -> SolverStat:
        """Read a segment (S, L); how the solve went."""
        out: Output = self.model(ids.to(self.device), self._memory, **self.call)
        nll = self.model.nll(out.z, target.to(self.device))
        past = self._memory or self.model.empty_memory(out.u)
        self._memory = past.followed_by(out, self.most)
        self._sum += nll.double().sum().cpu()
        self.count += target.numel()
        return out.stats

    @property
    def mean(self) -> float:
        """Nats per token."""
        return float(self._sum) / max(1, self.count)

    @property
    def perplexity(self) -> float:
        """`exp` of the mean."""
        return exp(self.mean) if self.mean < 700 else inf


class StepsCurve(NamedTuple):
    """Loss and relative residual after so many evaluations of f."""

    steps: list[int]
    loss: list[float]
    residual: list[float]


def steps_curve(
    model: nn.Module,
    data: Streams,
    memory: int,
    device: torch.device,
    steps: Sequence[int] = (2, 4, 6, 8, 12, 16, 24, 40),
    segments: int = 2,
) -> StepsCurve:
    """What more evaluations are worth, on the first segments of a text."""
    curve = StepsCurve(list(steps), [], [])
    for k in steps:
        read = Reading(model, memory, device, f_max_iter=k)
        residuals = []
        for n in range(min(segments, len(data))):
            stats = read(*data.segment(n))
            residuals.append(float(stats["rel_lowest"].mean()))
        curve.loss.append(read.mean)
        curve.residual.append(sum(residuals) / len(residuals))
    return curve


def unwrapped(model: nn.Module) -> DEQTransformer:
    """The model inside what parallel training puts around it."""
    inner = getattr(model, "module", model)
    assert isinstance(inner, DEQTransformer)
    return inner
