"""What a person sees while a model trains: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import time
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from deq_zoo.run import as_json


class Display(Protocol):
    """Told about every logged step and every evaluation."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *error: Any) -> None: ...
    def step(self, step: int, values: dict[str, float]) -> None: ...
    def judged(self, step: int, metrics: dict[str, float], solver: dict[str, Any]) -> None: ...


def make_display(steps: int, start: int, quiet: bool) -> Display:
    """The display that fits where the output goes."""
    if quiet:
        return Silent()
    return Live(steps, start) if sys.stdout.isatty() else Lines(steps)


class Silent:
    """Says nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def step(self, step: int, values: dict[str, float]) -> None:
        pass

    def judged(self, step: int, metrics: dict[str, float], solver: dict[str, Any]) -> None:
        pass


class Lines(Silent):
    """One JSON object per line, training at most once a second, for files and pipes."""

    def __init__(self, steps: int) -> None:
        self.steps, self._told = steps, 0.0

    def step(self, step: int, values: dict[str, float]) -> None:
        if time.monotonic() - self._told >= 1 or step == self.steps:
            self._told = time.monotonic()
            self._print({"step": step, "of": self.steps, **values})

    def judged(self, step: int, metrics: dict[str, float], solver: dict[str, Any]) -> None:
        told = {"nfe": solver["nfe"], "residual": solver["residual"]}
        self._print({"step": step, "of": self.steps, **metrics, **told})

    def _print(self, values: dict[str, Any]) -> None:
        rounded = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in values.items()}
        try:
            print(as_json(rounded), flush=True)
        except BrokenPipeError:  # nobody listens any more: go on in silence
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115


_SHORT = {"samples_per_s": "/s", "residual": "res", "train_accuracy": "acc"}


class Live:
    """A progress bar with the latest numbers."""

    def __init__(self, steps: int, start: int) -> None:
        numbers = Column(ratio=1, no_wrap=True, overflow="ellipsis")
        self._progress = Progress(
            BarColumn(bar_width=12),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[told]}", table_column=numbers),
            console=Console(),
            expand=True,
        )
        self._task = self._progress.add_task("", total=steps, completed=start, told="")
        self._score = ""

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def step(self, step: int, values: dict[str, float]) -> None:
        shown = {k: v for k, v in values.items() if k != "lr"}
        told = " ".join(f"{_SHORT.get(name, name)} {value:.3g}" for name, value in shown.items())
        self._progress.update(self._task, completed=step, told=f"{self._score}{told}")

    def judged(self, step: int, metrics: dict[str, float], solver: dict[str, Any]) -> None:
        told = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        self._progress.console.print(
            f"step {step}: {told}  nfe {solver['nfe']:.3g}  residual {solver['residual']:.2g}",
            highlight=False,
        )
        name, value = next(iter(metrics.items()))
        self._score = f"{name} {value:.3g} | "
