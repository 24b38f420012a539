"""Means over the updates between two lines of the log."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from deq_zoo.record import SolverRecord
from deq_zoo.task import Loss

if TYPE_CHECKING:
    from deq_zoo.processes import Processes

_SOLVER = ("samples", "nfe", "residual", "finite")  # sums of a `SolverRecord`


class Window:
    """Sums since the last line of the log, kept on the device until the next one."""

    def __init__(self) -> None:
        self.rate = 0.0
        self._clear()

    def _clear(self) -> None:
        self._sums: dict[str, Tensor | float] = {}
        self._counts: Counter[str] = Counter()  # not every batch has every metric
        self._stats: list[Any] = []
        self._solver = SolverRecord()
        self._samples = 0
        self.start()

    def start(self) -> None:
        """Start the clock of this window now."""
        self._began = time.monotonic()

    def pause(self, seconds: float) -> None:
        """Leave seconds out of the speed that the window shows."""
        self._began += seconds

    def add(self, loss: Loss, samples: int) -> None:
        """Add the loss of one batch."""
        self._samples += samples
        for name, value in {"loss": loss.value, **loss.metrics}.items():
            self._sums[name] = self._sums.get(name, 0.0) + value.detach()
            self._counts[name] += 1
        if loss.stats is not None:
            self._stats.append(loss.stats)

    @property
    def loss(self) -> float:
        """Return the sum of the losses, which is finite if all of them are; syncs the device."""
        return float(self._sums.get("loss", 0.0))

    def state(self) -> dict[str, Any]:
        """Return the numbers that a checkpoint needs to go on within a window."""
        self._read_stats()
        sums = {name: float(total) for name, total in self._sums.items()}
        solver = {name: getattr(self._solver, name) for name in _SOLVER}
        return {
            "sums": sums,
            "counts": dict(self._counts),
            "samples": self._samples,
            "solver": solver,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from the numbers that `state` returned."""
        self._sums, self._samples = dict(state["sums"]), state["samples"]
        self._counts = Counter(_counts(state))
        self._solver = SolverRecord(**state.get("solver", {}))

    def restore_shared(self, states: Sequence[dict[str, Any]], count: int) -> None:
        """Go on from the numbers of all former processes, as one of `count` processes."""
        mean = {
            name: sum(state["sums"][name] for state in states) / len(states)
            for name in states[0]["sums"]
        }
        self.restore(
            {
                "sums": mean,
                "counts": _counts(states[0]),
                "samples": sum(state["samples"] for state in states) // count,
                "solver": _summed([state.get("solver", {}) for state in states]),
            }
        )

    def _read_stats(self) -> None:
        for stats in self._stats:
            self._solver.add(stats)
        self._stats.clear()

    def empty(self, processes: Processes) -> dict[str, float]:
        """Return the means over all processes, and begin a new window."""
        seconds = max(1e-9, time.monotonic() - self._began)
        self._read_stats()
        means = {name: float(total) / self._counts[name] for name, total in self._sums.items()}
        if self._solver.samples:
            summary = self._solver.summary()
            means |= {"nfe": summary["nfe"], "residual": summary["residual"]}
        means["samples_per_s"] = self._samples / seconds
        means = processes.mean(means)
        means["samples_per_s"] *= processes.count
        self._clear()
        return {**means, "lr": self.rate}


def _counts(state: dict[str, Any]) -> dict[str, int]:
    """Return how many batches had each metric; earlier versions counted all for every metric."""
    if "counts" in state:
        return dict(state["counts"])
    return dict.fromkeys(state["sums"], state["steps"])


def _summed(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {name: sum(row[name] for row in rows) for name in rows[0]}
