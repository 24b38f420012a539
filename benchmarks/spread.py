"""Numbers that were measured several times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import quantiles


@dataclass(frozen=True)
class Spread:
    """The middle of a sample, its lowest value and its quartiles."""

    median: float
    low: float
    q1: float
    q3: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if len(values) == 1:
            return cls(values[0], values[0], values[0], values[0], 1)
        q1, middle, q3 = quantiles(values, n=4, method="inclusive")
        return cls(middle, min(values), q1, q3, len(values))

    @property
    def iqr(self) -> float:
        return self.q3 - self.q1

    @property
    def tilde(self) -> str:
        """Return a mark for differences whose noise is larger than their value."""
        return "~" if self.iqr > abs(self.median) else ""

    @property
    def percent(self) -> str:
        """Return the interquartile range in percent of the median."""
        return f"{100 * self.iqr / self.median:.0f}%"
