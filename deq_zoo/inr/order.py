"""Random permutations of very many points, of which any part is computed alone.

A video has tens of millions of points, and shuffling a list of them takes seconds. A small cipher
on indices computes any part of a permutation without the list.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deq_zoo.task import WHOLE, Shard, generator, steps_in_epoch

_ROUNDS = 5
_MIX = 0x2545F4914F6CDD1D


def permute(n: int, places: Tensor, *key: object) -> Tensor:
    """Return the numbers at some places of a random permutation of `range(n)`.

    A Feistel network permutes the numbers below the next power of four; a result of n or more goes
    through the network again.

    Args:
        n: the length of the permutation.
        places: which of its entries.
        *key: decides the permutation.
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    keys = torch.randint(1 << 40, (_ROUNDS,), generator=generator("order", *key)).tolist()
    numbers = places.clone()
    outside = torch.ones_like(places, dtype=torch.bool)
    while bool(outside.any()):
        left, right = numbers[outside] >> half, numbers[outside] & mask
        for k in keys:
            mixed = (right + k) * _MIX
            mixed = (mixed ^ (mixed >> 29)) * _MIX
            left, right = right, left ^ ((mixed >> 31) & mask)
        numbers[outside] = (left << half) | right
        outside = numbers >= n
    return numbers


def sample_batch(n: int, size: int, step: int, seed: int, shard: Shard = WHOLE) -> Tensor:
    """Return batch `step` of `size` out of `n` points, sorted; every epoch has a new order."""
    epoch, k = divmod(step, steps_in_epoch(n, size))
    places = torch.arange(k * size, min(n, (k + 1) * size))[shard.rank :: shard.world]
    return permute(n, places, seed, epoch).sort().values
