"""Training for a given processor time: what counts, what is stored, how a stopped run goes on."""

from __future__ import annotations

import hashlib
import time
from abc import ABC, abstractmethod
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any, Generic, TypeVar

from torch import nn
from torch.optim import Optimizer

from benchmarks.peak import forget_peak, growth_mb
from deq_zoo.checkpoint import Checkpoint
from deq_zoo.randomness import random_state, restore_random_state

_SAVE = 60.0  # processor seconds between two checkpoints


M = TypeVar("M", bound=nn.Module)


class TimedTraining(ABC, Generic[M]):
    """A training run that ends when its updates have taken a given processor time.

    Evaluations in between do not count. The peak memory is that of updates alone: it is read
    before the first evaluation.

    Args:
        model: the model.
        optimizer: of its parameters.
        seconds: the processor time.
        file: the checkpoint; a run whose file exists goes on from there.
        identity: everything that makes this run another one, with a `repr` that says so.

    Attributes:
        step: updates so far.
        spent: their processor seconds.
        carry: what the next update starts from.
        curve: points of the learning curve.
        counts: events that a run counts.
    """

    def __init__(
        self, model: M, optimizer: Optimizer, seconds: float, file: Path, identity: object
    ) -> None:
        self._identity = hashlib.sha256(repr(identity).encode()).hexdigest()
        self.model, self.optimizer, self.seconds, self.file = model, optimizer, seconds, file
        self.step, self.spent, self.carry = 0, 0.0, None
        self.curve: list[dict[str, Any]] = []
        self.counts: Counter[str] = Counter()
        self._times: list[float] = []
        self._peak: float | None = None
        self._before = forget_peak()
        if file.exists():
            self._resume()

    @abstractmethod
    def update(self, share: float) -> Any:
        """Make one update, after a share of the time; return what the next one starts from."""

    @abstractmethod
    def due(self) -> bool:
        """Return whether the learning curve gets a point after this update."""

    @abstractmethod
    def look(self) -> dict[str, Any]:
        """Evaluate the model; return a point of the learning curve."""

    def run(self) -> None:
        """Train until the time is spent."""
        saved = self.spent
        while self.spent < self.seconds:
            began = time.process_time()
            self.carry = self.update(self.spent / self.seconds)
            self._times.append(time.process_time() - began)
            self.spent += self._times[-1]
            self.step += 1
            if self.due():
                self._add_point()
            if self.spent - saved > _SAVE:
                saved = self.spent
                self._save()
        if not self.curve or self.curve[-1]["updates"] < self.step:
            self._add_point()
        self._save()

    def peak_of(self, updates: int) -> float:
        """Make some updates like those at the end of a run; return their peak memory in MB."""
        for _ in range(updates):
            self.carry = self.update(1.0)
            self.step += 1
        return growth_mb(self._before)

    def figures(self) -> dict[str, Any]:
        """Return the time of an update, the peak memory and the learning curve."""
        return {
            "updates": self.step,
            "ms_per_step": 1e3 * median(self._times),
            "peak_mb": self._peak,
            "curve": self.curve,
        }

    def _add_point(self) -> None:
        if self._peak is None:
            self._peak = growth_mb(self._before)
        spent = {"seconds": round(self.spent, 1), "updates": self.step}
        self.curve.append(spent | self.look())

    def _save(self) -> None:
        own = {"spent": self.spent, "curve": self.curve, "times": self._times, "peak": self._peak}
        own["identity"] = self._identity
        Checkpoint(
            self.step,
            self.model.state_dict(),
            optimizer=self.optimizer.state_dict(),
            carry=self.carry,
            randomness=random_state(),
            notes=own | {"counts": dict(self.counts)},
        ).save(self.file)

    def _resume(self) -> None:
        checkpoint = Checkpoint.load(self.file)
        if checkpoint.notes.get("identity") != self._identity:
            raise RuntimeError(f"{self.file} is of a run with other settings: delete it")
        self.model.load_state_dict(checkpoint.model)
        self.optimizer.load_state_dict(checkpoint.optimizer)
        restore_random_state(checkpoint.randomness)
        self.step, self.carry, notes = checkpoint.step, checkpoint.carry, checkpoint.notes
        self.spent, self.curve = notes["spent"], notes["curve"]
        self._times, self._peak = notes["times"], notes["peak"]
        self.counts.update(notes["counts"])
