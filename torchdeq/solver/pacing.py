"""Pacing: when the host looks at the residuals again, if a solve chooses this itself."""

from __future__ import annotations

from math import inf, log

_FRACTION = 0.6  # of the evaluations that seem to remain: look again after these
_STEADY = 3.0  # two rates of decay that differ by more than this factor predict nothing


class Pace:
    """The number of evaluations until the next check.

    While the worst residual is far from the goal and shrinks at a steady rate, the host looks less
    often: after a fraction of the evaluations that the faster of the last two rates predicts. Near
    the goal, and whenever the rate is not steady, every evaluation is checked.

    Args:
        goal: the residual at which a sample has finished.
        most: evaluations between two checks, at most.
    """

    def __init__(self, goal: float, most: int) -> None:
        self._goal, self._most = goal, most
        self._worst, self._count = inf, 0  # at the last check
        self._rate: float | None = None  # decay of the logarithm per evaluation, before that

    def next_interval(self, worst: float, count: int) -> int:
        """Return the evaluations until the next check.

        Args:
            worst: the largest residual of the unfinished samples, each at its best so far.
            count: evaluations so far.
        """
        before, last, previous = self._worst, self._count, self._rate
        self._worst, self._count, self._rate = worst, count, None
        if not self._goal < worst < before < inf:
            return 1
        rate = self._rate = log(before / worst) / (count - last)
        if previous is None or not 1 / _STEADY <= rate / previous <= _STEADY:
            return 1
        remaining = log(worst / self._goal) / max(rate, previous)
        return max(1, min(self._most, int(_FRACTION * remaining)))
