"""What a stream does with every sample, and what it has done so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchdeq.autocast import AutocastState
from torchdeq.solver.base import Solver
from torchdeq.stopping import StopRule
from torchdeq.stream.isolation import Halt


@dataclass
class Counts:
    """What a stream has done so far."""

    calls: int = 0  # of `f`, on all rows of the batch at once
    evaluations: int = 0  # rows that those calls evaluated
    useful: int = 0  # evaluations of samples that have left, up to the end of each
    finished: int = 0  # samples that have left


@dataclass(frozen=True)
class Rule:
    """What a stream does with every sample: the arguments of `Stream`."""

    f: Callable[..., Any]
    solver: Solver[Any]
    stop: StopRule
    slots: int
    has_aux: bool
    halt: Halt | None
    eps: float | None
    autocast: dict[str, AutocastState]
