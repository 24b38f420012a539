"""Published import path of the statistics."""

from torchdeq.stats import SolverStat

__all__ = ["SolverStat"]
