"""Starts for a solve."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def mixed_init(
    z_shape: Sequence[int],
    device: torch.device | str | int | None = None,
    *,
    dtype: torch.dtype | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """A random start: each element Gaussian or zero, with probability 1/2.

    Training from such starts favours equilibria that do not depend on the start (Anil et al., 2022,
    path independence). The same seed gives the same numbers as in torchdeq 0.1.0.

    Args:
        z_shape: the shape, batch first.
        device: where to draw; torch's default if None.
        dtype: a floating-point dtype; torch's default if None.
        generator: the source of random numbers, on ``device``; torch's global one if None.
    """
    z = torch.randn(tuple(z_shape), device=device, dtype=dtype, generator=generator)
    return z.mul_(torch.empty_like(z).bernoulli_(0.5, generator=generator))
