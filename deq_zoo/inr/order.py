"""A random order of very many things, looked up without being made.

A video has tens of millions of points. A permutation of them is a list that takes seconds to
shuffle; a small cipher on numbers answers for any part of it at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deq_zoo.task import WHOLE, Shard, generator, steps_in_epoch

_ROUNDS = 5
_MIX = 0x2545F4914F6CDD1D


def permuted(n: int, places: Tensor, *key: object) -> Tensor:
    """What stands at some places of a random permutation of `range(n)` that `key` decides.

    A Feistel network permutes the next power of four; what falls outside is sent through again.
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    keys = torch.randint(1 << 40, (_ROUNDS,), generator=generator("order", *key)).tolist()
    found = places.clone()
    outside = torch.ones_like(places, dtype=torch.bool)
    while bool(outside.any()):
        left, right = found[outside] >> half, found[outside] & mask
        for k in keys:
            mixed = (right + k) * _MIX
            mixed = (mixed ^ (mixed >> 29)) * _MIX
            left, right = right, left ^ ((mixed >> 31) & mask)
        found[outside] = (left << half) | right
        outside = found >= n
    return found


def sampled(n: int, size: int, step: int, seed: int, shard: Shard = WHOLE) -> Tensor:
    """Batch `step` of `size` out of `n` points, rising; every epoch has a new order."""
    epoch, k = divmod(step, steps_in_epoch(n, size))
    places = torch.arange(k * size, min(n, (k + 1) * size))[shard.rank :: shard.world]
    return permuted(n, places, seed, epoch).sort().values
