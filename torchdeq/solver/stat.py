"""Published import path of the statistics."""

from torchdeq.solver.stats import SolverStat

__all__ = ["SolverStat"]
