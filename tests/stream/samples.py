"""Requests whose answers are known from a solve of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchdeq import Anderson, StopRule, solve
from torchdeq.stream import Request

STOP = StopRule(200, 1e-9)


def f(z: Tensor, rate: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(rate * z + x)


def request(i: int, rate: float = 0.5, **options: Any) -> Request:
    x = torch.linspace(-1, 1, 3, dtype=torch.float64) + i / 10
    return Request(torch.zeros_like(x), (torch.tensor([rate]).double(), x), i, **options)


def alone(one: Request, stop: StopRule = STOP) -> Tensor:
    args = tuple(t[None] for t in one.args)
    z: Tensor = solve(f, one.z0[None], Anderson(), stop, args=args, on_failure="ignore").z[0]
    return z
