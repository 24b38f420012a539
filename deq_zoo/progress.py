"""What a person sees while a model trains: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import json
import sys
import time
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Display(Protocol):
    """Told about every logged step and every evaluation."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *error: Any) -> None: ...
    def step(self, step: int, values: dict[str, float]) -> None: ...
    def say(self, text: str) -> None: ...


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

    def say(self, text: str) -> None:
        pass


class Lines(Silent):
    """One JSON object per line, at most one a second, for files and pipes."""

    def __init__(self, steps: int) -> None:
        self.steps, self._told = steps, 0.0

    def step(self, step: int, values: dict[str, float]) -> None:
        if time.monotonic() - self._told >= 1 or step == self.steps:
            self._told = time.monotonic()
            rounded = {k: float(f"{v:.4g}") for k, v in values.items()}
            print(json.dumps({"step": step, "of": self.steps, **rounded}), flush=True)

    def say(self, text: str) -> None:
        print(text, flush=True)


class Live:
    """A progress bar with the latest numbers."""

    def __init__(self, steps: int, start: int) -> None:
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[told]}"),
            TimeRemainingColumn(compact=True),
            console=Console(),
        )
        self._task = self._progress.add_task("training", total=steps, completed=start, told="")

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
        told = "  ".join(f"{name} {value:.3g}" for name, value in values.items() if name != "lr")
        self._progress.update(self._task, completed=step, told=told)

    def say(self, text: str) -> None:
        self._progress.console.print(text, highlight=False)
