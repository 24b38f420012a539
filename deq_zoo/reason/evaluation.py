"""Evaluation of reasoners: exact answers, evaluations spent, and residuals as a confidence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from deq_zoo.reason.inference import find_answers, record_answers
from deq_zoo.reason.keyed import draw_starts, recursion_noise
from deq_zoo.reason.loss import IGNORED
from deq_zoo.reason.model import Reasoner
from deq_zoo.reason.sets import PuzzleSet
from deq_zoo.record import SolverRecord
from deq_zoo.task import Evaluation

if TYPE_CHECKING:
    from deq_zoo.reason.task import SolvePuzzles

_FEW = 8  # puzzles whose spectral radius is estimated: each costs a hundred products


class Answered(NamedTuple):
    """Answers to a set of puzzles.

    Args:
        tokens: (N, L).
        sure: (N,), whether the halting head thinks that the answer is right.
        residual: (N,), relative.
        evaluations: (N,), supervision steps spent.
    """

    tokens: Tensor
    sure: Tensor
    residual: Tensor
    evaluations: Tensor


def evaluate_puzzles(
    task: SolvePuzzles, model: Reasoner, data: PuzzleSet, thorough: bool
) -> Evaluation:
    """Return the evaluation of a model on puzzles, as the task says."""
    record = SolverRecord()
    if task.evaluation == "stream":
        answered = _by_stream(task, model, data, record)
    else:
        parts = list(_by_batch(task, model, data, record))
        answered = Answered(*(torch.cat(column) for column in zip(*parts, strict=True)))
    metrics = score_answers(answered, data)
    if thorough:
        tokens = data.tokens[:_FEW].long().to(model.device)
        ids = data.ids[:_FEW].to(model.device)
        z0 = draw_starts(model, tokens, task.search.seed)
        stats = model(tokens, z0, ids=ids, sradius_mode=True).stats
        assert stats is not None
        record.radii += stats["sradius"].tolist()
    return Evaluation(metrics, record)


def _by_batch(
    task: SolvePuzzles, model: Reasoner, data: PuzzleSet, record: SolverRecord
) -> Iterator[Answered]:
    """Yield the answers of each batch, by the recursion or by the solver."""
    seed = task.search.seed
    for rows in torch.arange(len(data)).split(task.eval_batch):
        tokens = data.tokens[rows].long().to(model.device)
        ids = data.ids[rows].to(model.device)
        z0 = draw_starts(model, tokens, seed)
        if task.evaluation == "recursion":
            noise = recursion_noise(tokens, seed)
            out = model.recurse(tokens, task.depth or model.trained_depth, z0, ids=ids, noise=noise)
        else:
            out = model(tokens, z0, ids=ids)
        assert out.q is not None
        assert out.stats is not None
        record.add(out.stats)
        residual = out.stats["rel_lowest"].double().cpu()
        if task.evaluation == "recursion":  # whose answer is the last state
            residual = out.stats["rel_trace"][:, -1].double().cpu()
        # A puzzle that has not converged has spent all evaluations, not those up to its best state.
        steps = torch.where(out.stats.converged, out.stats["nstep"], out.stats.nfe).cpu()
        yield Answered(out.prediction.argmax(-1).cpu(), (out.q[:, 0] > 0).cpu(), residual, steps)


def _by_stream(
    task: SolvePuzzles, model: Reasoner, data: PuzzleSet, record: SolverRecord
) -> Answered:
    answers = list(find_answers(model, data.tokens.long(), task.search, data.ids))
    record_answers(record, answers)
    return Answered(
        torch.stack([answer.tokens for answer in answers]),
        torch.tensor([answer.head > 0.5 for answer in answers]),
        torch.tensor([answer.residual for answer in answers], dtype=torch.float64),
        torch.tensor([answer.evaluations for answer in answers]),
    )


def score_answers(answered: Answered, data: PuzzleSet) -> dict[str, float]:
    """Return the metrics of answers, on puzzles that have a cell to score."""
    labels = data.labels.long()
    scored = labels != IGNORED
    kept = scored.any(1)
    right_cells = (answered.tokens == labels) & scored
    right = (right_cells == scored).all(1)
    cells = right_cells.sum(1) / scored.sum(1).clamp_min(1)

    def percent(values: Tensor) -> float:
        return 100 * float(values[kept].double().mean()) if bool(kept.any()) else 0.0

    residual = answered.residual[kept]
    return {
        "exact": percent(right),
        "cells": percent(cells),
        "head": percent(answered.sure == right),
        "confidence": 100 * ranking(residual, right[kept]),
        "residual": float(residual[residual.isfinite()].median()) if len(residual) else 0.0,
        "evaluations": float(answered.evaluations[kept].double().mean()),
    }


def ranking(residual: Tensor, right: Tensor) -> float:
    """Return how often a right answer has a lower residual than a wrong one; equal ones count half.

    It is the area under the ROC curve: 0.5 says that residuals tell nothing, or that all answers
    are right, or all wrong. NaN counts as infinity, the worst residual.
    """
    residual = torch.where(residual.isnan(), torch.inf, residual)
    good, bad = residual[right], residual[~right].sort().values
    if not len(good) or not len(bad):
        return 0.5
    # Sorted, not by pairs: a test of 400,000 puzzles has too many of them.
    lower, not_higher = (torch.searchsorted(bad, good, side=side) for side in ("left", "right"))
    return 1 - float((lower + not_higher).double().mean()) / (2 * len(bad))
