"""Reading a text in segments: the loss of each token, and what further evaluations of f bring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from deq_zoo.compaction import Compaction
from deq_zoo.lm.data import Streams
from deq_zoo.lm.memory import LMOutput, Memory
from deq_zoo.lm.prediction import SegmentSizes, perplexity
from torchdeq import SolverStat

if TYPE_CHECKING:
    from deq_zoo.lm.language_model import LanguageModel


class ReadSegment(NamedTuple):
    """The negative log-likelihood (S, L) of the tokens after a segment, and the model's output."""

    nll: Tensor
    out: LMOutput


class Reading:
    """A text that a model reads from its beginning, segment by segment.

    Args:
        model: in evaluation mode.
        memory: tokens that the model remembers.
        **call: options of each call of the DEQ.
    """

    def __init__(self, model: LanguageModel, memory: int, **call: Any) -> None:
        self.model, self.most, self.call = model, memory, call
        self._solve = Compaction(model)
        self.count = 0
        self._sum = torch.zeros((), dtype=torch.float64)
        self._memory: Memory | None = None

    def __call__(self, ids: Tensor, target: Tensor, z0: Tensor | None = None) -> ReadSegment:
        """Read a segment (S, L) and add the loss of `target`, the tokens after it."""
        device = self.model.device
        out = self._solve(ids.to(device), z0, memory=self._memory, **self.call)
        assert isinstance(out, LMOutput)
        nll = self.model.nll(out.z, target.to(device))
        past = self._memory or self.model.empty_memory(out.u)
        self._memory = past.followed_by(out, self.most)
        self._sum += nll.double().sum().cpu()
        self.count += target.numel()
        return ReadSegment(nll, out)

    @property
    def loss(self) -> float:
        """Return the mean loss so far, in nats per token."""
        return float(self._sum) / max(1, self.count)

    @property
    def perplexity(self) -> float:
        """Return `exp` of the loss."""
        return perplexity(self.loss)


def score_text(
    model: LanguageModel, ids: Tensor, sizes: SegmentSizes, z0: Tensor | None, **call: Any
) -> tuple[Tensor, Tensor, SolverStat]:
    """Return log-probabilities (N - 1,), states (1, N - 1, D) and statistics of a text.

    Args:
        model: in evaluation mode.
        ids: (N,) tokens.
        sizes: of segments and memory.
        z0: (1, N - 1, D) states to start from; None lets the model choose.
        **call: options of each call of the DEQ.
    """
    streams = Streams.of(ids, 1, sizes.length)
    expected = (1, len(ids) - 1, model.config.width)
    if z0 is not None and z0.shape != expected:
        raise ValueError(
            f"z0 must have a state for each token but the last, {expected}, got {tuple(z0.shape)}"
        )
    starts = [None] * len(streams) if z0 is None else z0.to(model.device).split(sizes.length, 1)
    reading = Reading(model, sizes.memory, **call)
    parts = [
        reading(data, target, start)
        for (data, target), start in zip(streams.segments(), starts, strict=True)
    ]
    log_probs = torch.cat([-part.nll[0].float().cpu() for part in parts])
    state = torch.cat([part.out.state for part in parts], dim=1)
    return log_probs, state, join_stats([part.out.stats for part in parts])


def join_stats(parts: Sequence[SolverStat]) -> SolverStat:
    """Return the statistics of several solves as those of one, without traces.

    Samples follow each other; `nfe` is the sum of all evaluations.
    """
    if len(parts) == 1:
        return parts[0]
    keys = ("abs_lowest", "rel_lowest", "nstep", "sradius")
    values = {key: torch.cat([stats[key] for stats in parts]) for key in keys}
    status = torch.cat([stats.status for stats in parts])
    return SolverStat(values, nfe=sum(stats.nfe for stats in parts), status=status)


class StepsCurve(NamedTuple):
    """The loss, in nats per token, and the relative residual by evaluations of f.

    Args:
        steps: numbers of evaluations.
        loss: after so many evaluations.
        residual: mean over streams and segments, after so many evaluations.
        tokens: how many tokens of the text the model predicted.
    """

    steps: list[int]
    loss: list[float]
    residual: list[float]
    tokens: int


def steps_curve(
    model: LanguageModel,
    data: Streams,
    memory: int,
    steps: Sequence[int] = (2, 4, 6, 8, 12, 16, 24, 40),
    segments: int = 2,
) -> StepsCurve:
    """Return loss and residual after several numbers of evaluations of f.

    Args:
        model: in evaluation mode.
        data: the text.
        memory: tokens that the model remembers.
        steps: the numbers of evaluations.
        segments: how many segments of the text are read.
    """
    losses, residuals = list[float](), list[float]()
    for k in steps:
        reading = Reading(model, memory, f_max_iter=k)
        by_segment = [
            float(reading(*data.segment(n)).out.stats["rel_lowest"].mean())
            for n in range(min(segments, len(data)))
        ]
        losses.append(reading.loss)
        residuals.append(sum(by_segment) / len(by_segment))
    return StepsCurve(list(steps), losses, residuals, reading.count)
