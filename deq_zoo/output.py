"""What every model of the zoo returns."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Any, Generic, TypeVar

from torchdeq import SolverStat

P = TypeVar("P")
S = TypeVar("S")


@dataclass(frozen=True)
class Output(Generic[P, S]):
    """The answer of a model.

    Args:
        predictions: one for each state that training samples, the best one last; in evaluation
            there is one.
        state: the equilibrium behind the last prediction, without a graph: a `z0` for the next
            call. None without an equilibrium.
        stats: statistics of the solve; None without an equilibrium.
    """

    predictions: list[P]
    state: S
    stats: SolverStat | None = None

    @property
    def prediction(self) -> P:
        """Return the prediction from the last state."""
        return self.predictions[-1]


def solve_data(stats: SolverStat | None) -> dict[str, Any]:
    """Return what programs need to know about a solve, as plain values.

    Args:
        stats: of the solve; None of a model without equilibrium gives nothing.
    """
    if stats is None:
        return {}
    residual = float(stats["rel_lowest"].max())
    return {
        "evaluations": stats.nfe,
        "residual": residual if isfinite(residual) else None,
        "settled": not bool(stats.failed.any()),
    }


def unsettled(stats: SolverStat | None) -> str:
    """Return a warning for people if a solve with a tolerance did not reach it, else "".

    Args:
        stats: of the solve; None is settled.
    """
    if stats is None or not bool(stats.failed.any()):
        return ""
    failed, total = int(stats.failed.sum()), len(stats.failed)
    which = "the solve" if total == 1 else f"the solve of {failed} of {total} samples"
    residual = float(stats["rel_lowest"].max())
    return f"{which} did not settle: relative residual {residual:.1e} after {stats.nfe} evaluations"
