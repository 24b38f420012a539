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
        z: the state, in the structure of the start. `fixed_point` makes it differentiable, `solve`
            does not.
        states: of `solve`, the recorded states, as many as were asked for; of `fixed_point`, all
            states that the backward pass returns, the last of them `z`.
        stats: residuals, steps and status of every sample.
        aux: with `has_aux`, what `f` returns beside its image at `z`.
    """

    z: S
    states: list[S]
    stats: SolverStat
    aux: Any = None
