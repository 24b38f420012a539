"""Scores of a model on sets of pairs, with what its solver did."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from deq_zoo.flow.augment import Pair
from deq_zoo.flow.data import in_batches
from deq_zoo.flow.datasets import FlowSet
from deq_zoo.flow.metrics import FlowScores
from deq_zoo.flow.model import DEQFlow, Side
from deq_zoo.record import SolverRecord
from deq_zoo.task import Evaluation
from torchdeq import SolverStat, StopRule, solve
from torchdeq.solver import FixedPointIter

Pairs = Sequence[Pair] | FlowSet
Sets = Mapping[str, Pairs]
_UNWATCHED = "simple_fixed_point_iter"  # records the last residual alone


@dataclass
class FlowRecord(SolverRecord):
    """A record of solves; the trace of an unwatched iteration comes from a solve of its own.

    Args:
        traced: the solve for the trace.
    """

    traced: SolverRecord = field(default_factory=SolverRecord)

    def trace(self) -> list[float]:
        own = super().trace()
        return own if len(own) > 1 else self.traced.trace()


class Kind(NamedTuple):
    """How the errors on a set are counted, and how its frames are padded."""

    sparse: bool
    masked: bool

    @property
    def pad(self) -> Side:
        return "bottom" if self.sparse else "both"


def kind_of(pairs: Pairs) -> Kind:
    """Return the kind of a set; pairs in memory are dense."""
    return Kind(pairs.sparse, pairs.masked) if isinstance(pairs, FlowSet) else Kind(False, False)


def score_sets(model: DEQFlow, sets: Sets, batch: int, thorough: bool) -> Evaluation:
    """Return the metrics of a model on sets of pairs by name; `aepe` is that of the first set.

    Args:
        model: in evaluation mode.
        sets: the sets by name.
        batch: pairs of one size that the model gets together.
        thorough: add spectral radius and trace of residuals, of the first pair.
    """
    record, metrics = FlowRecord(), dict[str, float]()
    for name, pairs in sets.items():
        scores, kind = FlowScores(), kind_of(pairs)
        for image1, image2, truth, valid in _batches(pairs, batch, model.device):
            if thorough and not record.samples:
                _examine(model, (image1[:1], image2[:1]), kind.pad, record)
            out = model((image1, image2), pad=kind.pad)
            record.add(out.stats)
            for one in zip(out.prediction, truth, valid, strict=True):
                scores.add(*one)
        summary = scores.summary(name, kind.sparse, kind.masked)
        metrics.setdefault("aepe", summary[f"{name}_aepe"])
        metrics |= summary
    return Evaluation(metrics, record)


def _batches(pairs: Pairs, size: int, device: torch.device) -> Iterator[tuple[Tensor, ...]]:
    for batch in in_batches(pairs, size):
        yield tuple(t.to(device) for t in collate(batch))


def collate(pairs: Sequence[Pair]) -> tuple[Tensor, ...]:
    """Return pairs of one size as a batch: frames, true flow and where it is valid."""
    return tuple(torch.stack(each) for each in zip(*pairs, strict=True))


def _examine(model: DEQFlow, x: tuple[Tensor, Tensor], pad: Side, record: FlowRecord) -> None:
    """Add spectral radius and trace of one pair: a radius costs a hundred products."""
    stats = model(x, pad=pad, sradius_mode=True).stats
    record.radii += stats["sradius"].tolist()
    if model.deq.config.f_solver == _UNWATCHED:
        record.traced.add(trace_residuals(model, x, pad))


def trace_residuals(model: DEQFlow, x: tuple[Tensor, Tensor], pad: Side = "both") -> SolverStat:
    """Return the statistics of the model's plain iteration with the residual of every step."""
    options = model.deq.config
    given, z0 = model.inject(*x, pad), model.zero_state(x[0], pad)

    def f(hid: Tensor, flow: Tensor) -> tuple[Tensor, Tensor]:
        return model.update_block(hid, flow, given)  # type: ignore[no-any-return]

    stop = StopRule(model.deq.eval_f_max_iter, 0.0)
    solver = FixedPointIter(**options.f_solver_kwargs)
    return solve(f, tuple(z0), solver, stop, on_failure="ignore").stats
