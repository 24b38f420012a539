"""The output of a reasoner, and what is measured and replayed beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from deq_zoo.output import Output
from deq_zoo.reason.core import Noise, States, no_noise


@dataclass(frozen=True)
class Reasoned(Output[Tensor, States]):
    """The output of a reasoner: `predictions` are logits (B, L, V).

    Args:
        q: (B, 2), the logits of halting and of going on.
        next_q: (B, 2), the same after one more supervision step; in training of HRM only.
        moved: (B,), how far the states moved from where they started, relative to their size.
    """

    q: Tensor | None = None
    next_q: Tensor | None = None
    moved: Tensor | None = None


def relative_change(before: States, after: States) -> Tensor:
    """Return (B,), the distance of two pairs of states relative to the size of the second."""
    old, new = (torch.cat([h.flatten(1) for h in states], dim=1) for states in (before, after))
    change: Tensor = (new - old).norm(dim=1) / new.norm(dim=1)
    return change


def replay(eps: Tensor | None = None) -> Noise:
    """Return noise that plays (B, calls, N, d) once; no noise for None."""
    if eps is None:
        return no_noise
    parts: Iterator[Tensor] = iter(eps.unbind(1))
    return lambda h: next(parts)
