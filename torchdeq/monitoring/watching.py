"""Watching a model: every solve in training recorded, without waiting for the device."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from torch import nn

from torchdeq.checks import require_whole
from torchdeq.deq import DEQBase
from torchdeq.monitoring.alarms import Alarm, Bells
from torchdeq.monitoring.hooks import attach
from torchdeq.monitoring.records import Pile, Record, Side
from torchdeq.stats import SolverStat

_LOG = logging.getLogger("torchdeq")


def watch(
    model: nn.Module,
    *,
    every: int = 50,
    path: str | Path | None = None,
    tensorboard: Any = None,
    on_alarm: Callable[[Alarm], object] | None = None,
) -> Watch:
    """Record the solves of all DEQs in a model while it trains.

    Outputs and gradients stay the same, bit for bit. A call costs a few references; once in `every`
    calls of a layer the statistics are read from the device and become a `Record` per side. Calls
    in evaluation mode are not recorded.

    Args:
        model: a model with modules from `get_deq` inside.
        every: training calls of a layer between two records.
        path: a file to append records to, one JSON object per line; with several processes, each
            needs its own.
        tensorboard: a folder for TensorBoard, or an object with `add_scalar`, e.g. the
            `SummaryWriter` of the program.
        on_alarm: called with each alarm, once per layer and kind; by default alarms are warnings of
            the logger `torchdeq`.

    Example:
        >>> with torchdeq.watch(model, path="solves.jsonl") as watching:
        ...     train(model)
        >>> print(watching.records[-1].residual, watching.alarms)
    """
    require_whole("every", every)
    return Watch(model, int(every), path, tensorboard, on_alarm)


class Watch:
    """The watch over a model; `remove` ends it and leaves the model as it was.

    Attributes:
        records: all records so far.
        alarms: all alarms so far.
    """

    def __init__(
        self,
        model: nn.Module,
        every: int,
        path: str | Path | None,
        tensorboard: Any,
        on_alarm: Callable[[Alarm], object] | None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
        layers = {name: m for name, m in model.named_modules() if isinstance(m, DEQBase)}
        if not layers:
            raise ValueError(
                f"{type(model).__name__} has no DEQ inside to watch: it must have a module from "
                "get_deq"
            )
        self._layers = layers
        self.records: list[Record] = []
        self.alarms: list[Alarm] = []
        self._every, self._on_alarm = every, on_alarm
        self._scalars, self._owns_scalars = _scalar_writer(tensorboard)
        self._file: TextIO | None = None if path is None else open(path, "a")  # noqa: SIM115
        self._steps = dict.fromkeys(layers, 0)
        self._bells = {name: Bells() for name in layers}
        self._piles: dict[tuple[str, Side], Pile] = {}
        self._handles: list[Any] = []
        for name, deq in layers.items():
            self._piles[name, "forward"], self._piles[name, "backward"] = Pile(), Pile()
            self._handles += attach(
                deq, partial(self._add_forward, name), self._piles[name, "backward"].add
            )

    def _add_forward(self, layer: str, stats: SolverStat) -> None:
        self._steps[layer] += 1
        pile = self._piles[layer, "forward"]
        pile.add(stats)
        if len(pile) >= self._every:
            self._empty(layer)

    def _empty(self, layer: str) -> None:
        """Make records of what a layer has piled up; reads the device."""
        sides: tuple[Side, Side] = ("forward", "backward")
        for side in sides:
            record = self._piles[layer, side].empty(layer, side, self._steps[layer])
            if record is not None:
                self._write(record)

    def _write(self, record: Record) -> None:
        self.records.append(record)
        if self._file is not None:
            print(json.dumps(record.as_data()), file=self._file, flush=True)
        if self._scalars is not None:
            tag = f"{record.layer or 'deq'}/{record.side}"
            for name in ("nfe", "residual", "worst", "failed"):
                self._scalars.add_scalar(f"{tag}/{name}", getattr(record, name), record.step)
        for alarm in self._bells[record.layer].ring(record, self._has_goal(record)):
            self.alarms.append(alarm)
            if self._on_alarm is not None:
                self._on_alarm(alarm)
            else:
                _LOG.warning("%s", alarm)

    def _has_goal(self, record: Record) -> bool:
        """Return whether the adjoint of a layer has a tolerance that it can miss."""
        return bool(self._layers[record.layer].config.b_stop.goal)

    def flush(self) -> None:
        """Make records of all solves so far; reads the device."""
        for layer in self._steps:
            self._empty(layer)

    def remove(self) -> None:
        """End the watch: remove all hooks, record what is left and close the files."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._scalars is not None and self._owns_scalars:
            self._scalars.close()
        self._scalars = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()


def _scalar_writer(tensorboard: Any) -> tuple[Any, bool]:
    """Return an object with `add_scalar` or None, and whether the watch must close it."""
    if tensorboard is None or hasattr(tensorboard, "add_scalar"):
        return tensorboard, False
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(
            "watch(tensorboard=FOLDER) needs the package tensorboard: pip install tensorboard, or "
            "use path=FILE for JSON lines"
        ) from error
    return SummaryWriter(tensorboard), True
