"""Random numbers that depend on a puzzle and a key alone: starts and noise of evaluations.

So an answer depends neither on the neighbours of its puzzle nor on earlier draws, and training goes
on as if there had been no evaluation.
"""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deq_zoo.reason.core import States
from deq_zoo.task import generator

if TYPE_CHECKING:
    from deq_zoo.reason.model import Reasoner

# The constants of splitmix64, as signed numbers.
_STEP = 0x9E3779B97F4A7C15 - 2**64
_MIX = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))
_BITS = 24  # of a uniform number


def draw_starts(model: Reasoner, tokens: Tensor, seed: int, attempt: int = 0) -> States:
    """Return the start of an attempt at each puzzle (B, L)."""
    if model.net.kind != "eqr" or not len(tokens):
        return model.start(len(tokens))
    rows = tokens.tolist()
    starts = [model.start(1, generator("start", seed, attempt, row)) for row in rows]
    return States(*(torch.cat(h) for h in zip(*starts, strict=True)))


def draw_frozen_noise(model: Reasoner, tokens: Tensor, seed: int) -> tuple[Tensor, ...]:
    """Return the noise (B, calls, N, d) of a solve for puzzles (B, L); nothing without noise."""
    if not model.freezes_noise:
        return ()
    rows = tokens.tolist()
    drawn = [model.freeze_noise(1, generator("noise", seed, row)) for row in rows]
    return tuple(torch.cat(eps) for eps in zip(*drawn, strict=True))


def recursion_noise(tokens: Tensor, seed: int) -> Callable[[Tensor], Tensor]:
    """Return fresh noise for every step of the published recursion on puzzles (B, L).

    A generator for each puzzle would be slow, so the numbers are hashes (splitmix64) of the puzzle,
    the step and the place in the state.
    """
    seeds = [generator("noise", seed, row).initial_seed() for row in tokens.tolist()]
    keys, step = torch.tensor(seeds, device=tokens.device).view(-1, 1, 1), 0

    def draw(h: Tensor) -> Tensor:
        nonlocal step
        size = h[0].numel()
        places = torch.arange(step * size, (step + 1) * size, device=h.device).view_as(h[0])
        step += 1
        return _normal(keys + _STEP * places, h.dtype)

    return draw


def _normal(counters: Tensor, dtype: torch.dtype) -> Tensor:
    """Return standard normal numbers that are hashes of whole numbers (int64)."""
    x = counters
    for shift, factor in _MIX:
        x = (x ^ _shift_right(x, shift)) * factor
    bits = _shift_right(x ^ _shift_right(x, 31), 64 - _BITS)
    # The middle of one of 2^24 intervals, so that neither end is reached.
    wide = dtype if dtype == torch.float64 else torch.float32
    uniform = (2 * bits + 1 - (1 << _BITS)).to(wide) / (1 << _BITS)  # in (-1, 1)
    return (sqrt(2) * uniform.erfinv()).to(dtype)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Return int64 numbers shifted as if they had no sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
