"""A solved state has the type of its start: `make lint` checks it, this runs it."""

from __future__ import annotations

from typing import NamedTuple, assert_type

import torch
from torch import Tensor

from torchdeq import Anderson, FixedPoint, StopRule, fixed_point, solve


class Pair(NamedTuple):
    h: Tensor
    c: Tensor


def halves(h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    return 0.5 * h, 0.5 * c


def test_a_solution_has_the_type_of_its_start() -> None:
    stop, t = StopRule(20, 1e-3), torch.ones(2, 3)
    assert_type(fixed_point(torch.cos, t), FixedPoint[Tensor])
    assert_type(solve(torch.cos, t, Anderson(), stop).z, Tensor)
    pair = assert_type(fixed_point(halves, Pair(t, t)).z, Pair)
    assert isinstance(pair, Pair)
    both = assert_type(solve(halves, [t, t], Anderson(), stop).z, list[Tensor])
    assert isinstance(both, list)
    named = fixed_point(lambda z: {"h": 0.5 * z["h"]}, {"h": t})
    assert_type(named.z, dict[str, Tensor])
    assert_type(named.states, list[dict[str, Tensor]])
    assert list(named.z) == ["h"]
