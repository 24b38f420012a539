"""Training of reasoners for a processor time, and the figures of such a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import cos, pi
from pathlib import Path
from typing import Any

import torch

from benchmarks.rows import Row
from benchmarks.timed import TimedTraining
from deq_zoo.evaluate import evaluate
from deq_zoo.preset import Preset
from deq_zoo.reason.model import Reasoner
from deq_zoo.reason.task import SolvePuzzles
from deq_zoo.tree import detached

_WARM = 50  # updates in which the rate rises


def train(preset: Preset, seconds: float, points: int, file: Path) -> Row:
    """Train for a processor time; return the figures of the run."""
    training = ReasonTraining(preset, seconds, points, file)
    training.run()
    return training.scores() | training.figures()


class ReasonTraining(TimedTraining[Reasoner]):
    """A reasoner that is trained by a rate that falls with the time.

    Args:
        preset: task, optimiser and seed.
        seconds: the processor time.
        points: of the learning curve.
        file: the checkpoint.
    """

    def __init__(self, preset: Preset, seconds: float, points: int, file: Path) -> None:
        task = preset.task
        assert isinstance(task, SolvePuzzles)
        self.preset, self.task, self.points = preset, task, points
        torch.manual_seed(preset.seed)
        model = task.build()
        model.facts = task.facts()
        task.open_data()
        super().__init__(
            model, preset.optim.make(model.parameters()), seconds, file, (preset, seconds)
        )

    def update(self, share: float) -> Any:
        rate = min(1.0, (self.step + 1) / _WARM) * 0.5 * (1 + cos(pi * min(1.0, share)))
        for group in self.optimizer.param_groups:
            group["lr"] = group.get("base_lr", self.preset.optim.lr) * max(rate, 0.02)
        batch = self.task.train_batch(self.step, self.preset.seed)
        self.model.train()
        loss = self.task.loss(self._watched(), batch, self.carry)
        self.optimizer.zero_grad()
        loss.value.backward()
        self.optimizer.step()
        self.task.after_step(self.model)
        return detached(loss.carry)

    def _watched(self) -> Callable[..., Any]:
        """Return the model, which counts the statuses of implicit gradients."""
        if not (self.task.gradient == "deq" and self.task.deq.ift):
            return self.model

        def count(stats: Any) -> None:
            self.counts["converged"] += int(stats.converged.sum())
            self.counts["not converged"] += int((~stats.converged).sum())

        return lambda *args, **options: self.model(*args, backward_writer=count, **options)

    def due(self) -> bool:
        return self.spent >= (len(self.curve) + 1) * self.seconds / self.points

    def look(self) -> dict[str, Any]:
        metrics = evaluate(self.task, self.model, "val", thorough=False).metrics
        return {name: metrics[name] for name in ("exact", "cells")}

    def scores(self) -> Row:
        """Return the figures on the test puzzles, at the depth of training and beyond it."""
        depth = self.task.depth or self.model.trained_depth
        scored = evaluate(self.task, self.model, "test", thorough=True)
        deep = evaluate(replace(self.task, depth=4 * depth), self.model, "test", thorough=False)
        return {
            "exact": scored.metrics["exact"],
            "cells": scored.metrics["cells"],
            "residual": scored.metrics["residual"],
            "confidence": scored.metrics["confidence"],
            "exact at 4x": deep.metrics["exact"],
            "residual at 4x": deep.metrics["residual"],
            "spectral_radius": scored.solver.summary().get("spectral_radius"),
            "parameters": sum(p.numel() for p in self.model.core.parameters()),
            "backward": dict(self.counts),
        }
