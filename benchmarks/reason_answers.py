"""What trained reasoners answer: with restarts, by streams, deeper, and on larger boards."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import isqrt
from pathlib import Path

import torch

from benchmarks.rows import Row
from deq_zoo.checkpoint import Checkpoint
from deq_zoo.evaluate import evaluate
from deq_zoo.loading import open_model
from deq_zoo.preset import Preset
from deq_zoo.reason.choice import convergence_scores, selection_metrics
from deq_zoo.reason.loss import IGNORED
from deq_zoo.reason.model import Reasoner
from deq_zoo.reason.search import Search
from deq_zoo.reason.sides import for_side
from deq_zoo.reason.task import SolvePuzzles
from deq_zoo.task import generator


@cache
def trained(source: str, tests: int) -> tuple[SolvePuzzles, Reasoner]:
    """Return a trained model, and its task with some of the test puzzles."""
    model, preset = open_model(source)
    task = preset.task
    assert isinstance(model, Reasoner)
    assert isinstance(task, SolvePuzzles)
    return replace(task, test_puzzles=min(tests, task.test_puzzles)), model


def at_depth(source: str, tests: int, factor: int) -> Row:
    """Return the metrics of the recursion at a depth."""
    task, model = trained(source, tests)
    task = replace(task, depth=factor * model.trained_depth)
    metrics = evaluate(task, model, "test", thorough=False).metrics
    return {name: metrics[name] for name in ("exact", "residual", "confidence", "evaluations")}


def at_side(source: str, count: int, side: int, factor: int) -> Row:
    """Return the metrics of a trained model on mazes of a side."""
    task, model = trained(source, count)
    return on_mazes(task, model, count, side, factor * model.trained_depth)


def after_training(
    preset: Preset, seconds: float, file: Path, count: int, side: int, depth: int
) -> Row:
    """Return the metrics on mazes of a side of what `reason_training.train` has saved.

    Args:
        preset: of the training.
        seconds: processor time of the whole training.
        file: its checkpoint.
        count: mazes.
        side: of the mazes.
        depth: supervision steps.
    """
    task = preset.task
    assert isinstance(task, SolvePuzzles)
    saved = Checkpoint.load(file)
    if saved.notes["spent"] < seconds:
        raise RuntimeError(f"{file} is of a run that has not ended: finish the part `mazes`")
    model = task.build()
    model.load_state_dict(saved.model)
    model.facts = task.facts()
    return on_mazes(task, model.eval(), count, side, depth)


def on_mazes(task: SolvePuzzles, model: Reasoner, count: int, side: int, depth: int) -> Row:
    """Return the metrics of the recursion on mazes of a side, whose paths grow with it."""
    own = isqrt(task.net.cells)
    low, high = (round(moves * side / own) for moves in task.paths)
    task = replace(
        task,
        net=replace(task.net, cells=side**2),
        paths=(low, high),
        puzzles=1,
        val_puzzles=1,
        test_puzzles=count,
        depth=depth,
    )
    metrics = evaluate(task, for_side(model, side), "test", thorough=False).metrics
    shown = {name: metrics[name] for name in ("exact", "cells", "residual", "confidence", "head")}
    return {**shown, "steps": task.depth, "paths": [low, high], "mazes": count}


@torch.no_grad()
def all_restarts(source: str, tests: int, starts: int, depth: int) -> Row:
    """Return the accuracy of every choice among restarts, each of the full depth."""
    task, model = trained(source, tests)
    puzzles, scores, answers = task.test_set, [], []
    for restart in range(starts):
        parts = []
        for number, rows in enumerate(torch.arange(len(puzzles)).split(task.eval_batch)):
            states = model.start(len(rows), generator("restart", restart, number))
            tokens, ids = puzzles.tokens[rows].long(), puzzles.ids[rows]
            states = model.recurse(tokens, depth - 4, states, ids=ids).state
            last = model.recurse(tokens, 4, states, ids=ids, every=True)  # three moves of logits
            parts.append(torch.stack(last.predictions)[-4:])
        logits = torch.cat(parts, dim=1)
        scores.append(convergence_scores(logits, 3))
        answers.append(logits[-1].argmax(-1))
    metrics = selection_metrics(
        torch.stack(scores, 1), torch.stack(answers, 1), puzzles.labels.long(), IGNORED, 1
    )
    shown = {name: 100 * metrics[name] for name in ("one", "top1", "vote", "any")}
    counts = {"starts": starts, "evaluations": float(starts * depth)}
    return {**shown, **counts}


def by_stream(source: str, tests: int, search: Search, tol: float, depth: int) -> Row:
    """Return accuracy and evaluations of a stream."""
    task, model = trained(source, tests)
    model.deq.f_tol, model.deq.eval_f_max_iter = tol, depth
    task = replace(task, evaluation="stream", depth=0, search=search)
    scored = evaluate(task, model, "test", thorough=False)
    statuses = scored.solver.summary()["statuses"]
    return {**{k: scored.metrics[k] for k in ("exact", "evaluations")}, "statuses": statuses}
