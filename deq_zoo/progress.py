"""The display of a training run: a live line on a terminal, lines of JSON elsewhere.

What takes long is named on stderr, in both.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from deq_zoo.log import as_json

_PATIENCE = 5.0  # seconds of silence before a user wonders


@contextmanager
def naming_what_takes_long(doing: str, quiet: bool) -> Iterator[None]:
    """Print what the block does if it takes longer than some seconds, and then how long it took.

    Args:
        doing: what, e.g. `scoring the test data`.
        quiet: print nothing.
    """
    if quiet:
        yield
        return
    began = time.monotonic()
    timer = threading.Timer(_PATIENCE, lambda: _tell(f"{doing} ..."))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        seconds = time.monotonic() - began
        if seconds > _PATIENCE:
            _tell(f"{doing}: {seconds:.0f} s")


def _tell(text: str) -> None:
    print(f"deq-zoo: {text}", file=sys.stderr, flush=True)


class Display(Protocol):
    """Something that shows every logged step and every evaluation."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *error: Any) -> None: ...
    def step(self, step: int, values: dict[str, float]) -> None: ...
    def evaluated(self, step: int, metrics: dict[str, float], solver: dict[str, Any]) -> None: ...


def make_display(steps: int, start: int, quiet: bool) -> Display:
    """Return a display for a terminal, or for a file or pipe."""
    if quiet:
        return Silent()
    return Live(steps, start) if sys.stdout.isatty() else Lines(steps)


class Silent:
    """A display that shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def step(self, step: int, values: dict[str, float]) -> None:
        pass

    def evaluated(self, step: int, metrics: dict[str, float], solver: dict[str, Any]) -> None:
        pass


class Lines(Silent):
    """One JSON object per line for files and pipes; steps of training at most once a second."""

    def __init__(self, steps: int) -> None:
        self.steps, self._shown = steps, 0.0

    def step(self, step: int, values: dict[str, float]) -> None:
        if time.monotonic() - self._shown >= 1 or step == self.steps:
            self._shown = time.monotonic()
            self._print({"step": step, "of": self.steps, **values})

    def evaluated(self, step: int, metrics: dict[str, float], solver: dict[str, Any]) -> None:
        shown = {"nfe": solver["nfe"], "residual": solver["residual"]}
        self._print({"step": step, "of": self.steps, **metrics, **shown})

    def _print(self, values: dict[str, Any]) -> None:
        rounded = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in values.items()}
        try:
            print(as_json(rounded), flush=True)
        except BrokenPipeError:  # the reader has gone: go on without output
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
            TextColumn("{task.fields[text]}", table_column=numbers),
            console=Console(),
            expand=True,
        )
        self._task = self._progress.add_task("", total=steps, completed=start, text="")
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
        text = " ".join(f"{_SHORT.get(name, name)} {value:.3g}" for name, value in shown.items())
        self._progress.update(self._task, completed=step, text=f"{self._score}{text}")

    def evaluated(self, step: int, metrics: dict[str, float], solver: dict[str, Any]) -> None:
        text = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        self._progress.console.print(
            f"step {step}: {text}  nfe {solver['nfe']:.3g}  residual {solver['residual']:.2g}",
            highlight=False,
        )
        name, value = next(iter(metrics.items()))
        self._score = f"{name} {value:.3g} | "
