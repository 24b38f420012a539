"""Means over the updates between two lines of the log."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deq_zoo.record import SolverRecord
from deq_zoo.task import Loss

if TYPE_CHECKING:
    from accelerate import Accelerator


class Window:
    """Numbers since the last line of the log, kept on the device until then."""

    def __init__(self) -> None:
        self.rate = 0.0
        self._clear()

    def _clear(self) -> None:
        self._sums: dict[str, Tensor | float] = {}
        self._stats: list[Any] = []
        self._solver = SolverRecord()
        self._steps = self._samples = 0
        self.start()

    def start(self) -> None:
        """Let the clock of this window run from now."""
        self._began = time.monotonic()

    def pause(self, seconds: float) -> None:
        """So long something else was done."""
        self._began += seconds

    def add(self, loss: Loss, samples: int) -> None:
        self._steps += 1
        self._samples += samples
        for name, value in {"loss": loss.value, **loss.metrics}.items():
            self._sums[name] = self._sums.get(name, 0.0) + value.detach()
        if loss.stats is not None:
            self._stats.append(loss.stats)

    def held(self) -> dict[str, Any]:
        """What a checkpoint needs to go on within a window."""
        sums = {name: float(total) for name, total in self._sums.items()}
        return {"sums": sums, "steps": self._steps, "samples": self._samples}

    def restore(self, held: dict[str, Any]) -> None:
        self._sums, self._steps, self._samples = held["sums"], held["steps"], held["samples"]

    def empty(self, accelerator: Accelerator) -> dict[str, float]:
        """The means over all processes; begins a new window."""
        seconds = max(1e-9, time.monotonic() - self._began)
        for stats in self._stats:
            self._solver.add(stats)
        told = {name: float(total) / max(1, self._steps) for name, total in self._sums.items()}
        if self._stats:
            summary = self._solver.summary()
            told |= {"nfe": summary["nfe"], "residual": summary["residual"]}
        told["samples_per_s"] = self._samples / seconds
        if accelerator.num_processes > 1:
            local = torch.tensor(list(told.values()), device=accelerator.device)
            means = accelerator.reduce(local, "mean").tolist()
            told = dict(zip(told, means, strict=True))
            told["samples_per_s"] *= accelerator.num_processes
        self._clear()
        return {**told, "lr": self.rate}
