"""The figures of a check and the decisions about its rows, as values."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchdeq import numbers
from torchdeq.stream.request import StreamStatus


class Ending(NamedTuple):
    """A row that has ended."""

    row: int
    status: StreamStatus
    evaluations: int
    steps: int  # evaluations up to the returned state; 0: the start itself is returned
    residual: float
    relative: float
    current: bool  # whether the row returns its current state, and not its best one


class Verdict(NamedTuple):
    """The judgement of one iterate."""

    better: Tensor  # (b,) which rows improved
    all_better: bool  # whether every row did, apart from idle ones
    endings: list[Ending]


class Residuals(NamedTuple):
    """The residuals of a check, on the host."""

    values: Tensor  # (2, K, b): |g| and |f(z)|
    smallest: float  # |g|
    largest: float  # |f(z)|
    ordinary: bool  # whether all of them are finite, and no square has left its range

    @classmethod
    def of(cls, values: Tensor) -> Residuals:
        """Return residuals with their bounds."""
        low, high = (t.tolist() for t in torch.aminmax(values.flatten(1), dim=1))
        return cls(values, low[0], high[1], numbers.bounds_in_range(low, high, values.dtype))
