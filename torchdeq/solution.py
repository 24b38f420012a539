"""The result of a fixed-point solve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic

from torchdeq.pytree import S
from torchdeq.stats import SolverStat


@dataclass(frozen=True)
class FixedPoint(Generic[S]):
    """A solved fixed point; the type parameter is the type of the start.

    Args:
        z: the state, in the structure of the start. From `fixed_point` it is differentiable, from
            `solve` it is not.
        states: from `solve`, the recorded states, one for each entry of `record`; from
            `fixed_point`, all states that the backward pass returns, `z` last.
        stats: residuals, steps and status of every sample.
        aux: with `has_aux`, the second value that `f` returns at `z`.
    """

    z: S
    states: list[S]
    stats: SolverStat
    aux: Any = None
