"""Training of reasoners for a processor time, resumable: a checkpoint after every minute of it."""

from __future__ import annotations

import resource
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from math import cos, pi
from pathlib import Path
from statistics import median
from typing import Any

import torch

from deq_zoo.checkpoint import Checkpoint
from deq_zoo.evaluate import evaluate
from deq_zoo.preset import Preset
from deq_zoo.randomness import random_state, restore_random_state
from deq_zoo.reason.model import Reasoner
from deq_zoo.reason.task import SolvePuzzles
from deq_zoo.tree import detached

_SAVE = 60.0  # processor seconds between two checkpoints
_WARM = 50  # updates in which the rate rises
Row = dict[str, Any]


class Training:
    """A model that is trained for a processor time, by a rate that falls with this time.

    Args:
        preset: task, optimiser and seed.
        seconds: the processor time.
        evaluations: how often the learning curve gets a point.
        file: the checkpoint.
    """

    def __init__(self, preset: Preset, seconds: float, evaluations: int, file: Path) -> None:
        task = preset.task
        assert isinstance(task, SolvePuzzles)
        self.preset, self.task, self.file = preset, task, file
        self.seconds, self.evaluations = seconds, evaluations
        torch.set_num_threads(1)
        torch.manual_seed(preset.seed)
        self.model: Reasoner = task.build()
        self.model.facts = task.facts()
        task.open_data()
        self.optimizer = preset.optim.make(self.model.parameters())
        self.step, self.spent, self.carry = 0, 0.0, None
        self.curve: list[Row] = []
        self.times: list[float] = []
        self.statuses: Counter[str] = Counter()  # of backward solves
        if file.exists():
            self._resume()

    def run(self) -> Row:
        """Train until the time is spent; return the figures of the run."""
        before, saved = peak_mb(), self.spent
        while self.spent < self.seconds:
            began = time.process_time()
            self._update()
            self.times.append(time.process_time() - began)
            self.spent += self.times[-1]
            if self.spent >= (len(self.curve) + 1) * self.seconds / self.evaluations:
                self._evaluate()
            if self.spent - saved > _SAVE:
                self._save()
                saved = self.spent
        peak = peak_mb() - before
        if not self.curve or self.curve[-1]["updates"] < self.step:
            self._evaluate()
        self._save()
        return self._figures(peak)

    def _update(self) -> None:
        share = min(1.0, self.spent / self.seconds)
        rate = min(1.0, (self.step + 1) / _WARM) * 0.5 * (1 + cos(pi * share))
        for group in self.optimizer.param_groups:
            group["lr"] = group.get("base_lr", self.preset.optim.lr) * max(rate, 0.02)
        batch = self.task.train_batch(self.step, self.preset.seed)
        self.model.train()
        loss = self.task.loss(self._watched(), batch, self.carry)
        self.optimizer.zero_grad()
        loss.value.backward()
        self.optimizer.step()
        self.task.after_step(self.model)
        self.carry, self.step = detached(loss.carry), self.step + 1

    def _watched(self) -> Callable[..., Any]:
        """Return the model, which counts the statuses of implicit gradients."""
        if not (self.task.gradient == "deq" and self.task.deq.ift):
            return self.model

        def count(stats: Any) -> None:
            self.statuses.update({"converged": int(stats.converged.sum())})
            self.statuses.update({"not converged": int((~stats.converged).sum())})

        return lambda *args, **options: self.model(*args, backward_writer=count, **options)

    def _evaluate(self) -> None:
        metrics = evaluate(self.task, self.model, "val", thorough=False).metrics
        row = {"seconds": round(self.spent, 1), "updates": self.step, "exact": metrics["exact"]}
        self.curve.append({**row, "cells": metrics["cells"]})

    def _figures(self, peak: float) -> Row:
        deeper = replace(self.task, depth=4 * self.task.net.max_steps)
        found = evaluate(self.task, self.model, "test", thorough=True)
        deep = evaluate(deeper, self.model, "test", thorough=False).metrics
        return {
            "exact": found.metrics["exact"],
            "cells": found.metrics["cells"],
            "residual": found.metrics["residual"],
            "confidence": found.metrics["confidence"],
            "exact at 4x": deep["exact"],
            "residual at 4x": deep["residual"],
            "spectral_radius": found.solver.summary().get("spectral_radius"),
            "ms_per_step": 1e3 * median(self.times) if self.times else None,
            "updates": self.step,
            "peak_mb": peak,
            "parameters": sum(p.numel() for p in self.model.core.parameters()),
            "backward": dict(self.statuses),
            "curve": self.curve,
        }

    def _save(self) -> None:
        notes = {"spent": self.spent, "curve": self.curve, "statuses": dict(self.statuses)}
        Checkpoint(
            self.step,
            self.model.state_dict(),
            optimizer=self.optimizer.state_dict(),
            carry=self.carry,
            randomness=random_state(),
            notes=notes,
        ).save(self.file)

    def _resume(self) -> None:
        checkpoint = Checkpoint.load(self.file)
        self.model.load_state_dict(checkpoint.model)
        self.optimizer.load_state_dict(checkpoint.optimizer)
        restore_random_state(checkpoint.randomness)
        self.step, self.carry = checkpoint.step, checkpoint.carry
        self.spent, self.curve = checkpoint.notes["spent"], checkpoint.notes["curve"]
        self.statuses.update(checkpoint.notes["statuses"])


def peak_mb() -> float:
    """Return the peak memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
