"""Further attempts of a request that ends without convergence, and the choice between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from math import inf
from typing import Literal

import torch
from torch import Tensor

from torchdeq.pytree import State
from torchdeq.stopping import StopRule
from torchdeq.stream.request import Request, Result

Restart = Callable[[Request, int], State]
Choose = Literal["residual"] | Callable[[Result], Hashable]


@dataclass(frozen=True)
class Retry:
    """What happens to requests that end without convergence.

    Args:
        times: further starts, at most.
        start: returns the start of a request for attempt 1, 2, ...
        choose: selects among the results of all attempts if none converged: `"residual"`, or a
            function that returns what a result votes for; the most frequent vote wins, and of its
            results that with the lowest residual. The residual is what the stop rule limits.
    """

    times: int = 0
    start: Restart | None = None
    choose: Choose = "residual"


def _measure(result: Result, rule: StopRule) -> float:
    """Return the residual of a result as its stop rule measures it."""
    size, ratio = result.residual, result.relative
    if not (size < inf and ratio < inf):
        return inf
    norm = size / ratio if ratio else 0.0
    pair = (torch.tensor(number, dtype=torch.float64) for number in (size, norm))
    return float(rule.measure(*pair))


def choose_result(results: list[Result], choose: Choose, rule: StopRule) -> Result:
    """Return the best of several results that did not converge.

    Args:
        results: of all attempts.
        choose: see `Retry`.
        rule: the stop rule of the request, in whose measure residuals are compared.
    """
    scores = [_measure(result, rule) for result in results]
    order = sorted(range(len(results)), key=lambda k: scores[k] if scores[k] < inf else inf)
    ordered = [results[k] for k in order]  # NaN is last
    if choose == "residual" or len(ordered) == 1:
        return ordered[0]
    votes = [choose(result) for result in ordered]
    if any(isinstance(vote, Tensor) for vote in votes):
        raise TypeError(
            "choose must return what can be compared, such as a number or a tuple of numbers, got "
            "a tensor: use .item() or tuple(t.tolist())"
        )
    most = max(Counter(votes).values())
    winner = next(vote for vote in votes if Counter(votes)[vote] == most)
    return ordered[votes.index(winner)]
