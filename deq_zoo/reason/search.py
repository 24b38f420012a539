"""How a trained reasoner spends evaluations: halting, restarts, and the choice between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from deq_zoo.checks import check_fields
from torchdeq import StopRule

Halt = Literal["residual", "head", "both"]
Choice = Literal["residual", "vote"]


@dataclass(frozen=True)
class Search:
    """Options of inference; solver, tolerance and budget of an attempt are those of the DEQ.

    Args:
        halt: what ends an attempt: the residual meets the tolerance, the halting head says so, or
            both at once.
        restarts: further attempts from new random starts, for puzzles that have not converged.
        choose: the answer if no attempt converged: that of the lowest residual, or the most
            frequent one.
        slots: puzzles that are solved at the same time, where one that has ended makes room for the
            next.
        seed: of the starts and of the noise; beside it, they depend on the puzzle alone.
    """

    halt: Halt = "residual"
    restarts: int = 0
    choose: Choice = "residual"
    slots: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self, 0, "restarts", "seed")
        check_fields(self, 1, "slots")


def relative_tolerance(stop: StopRule) -> float:
    """Return the relative tolerance of a stop rule, for halting by both; 0 without one."""
    if stop.mode == "rel" and stop.tol:
        return stop.tol
    return stop.rtol or 0.0
