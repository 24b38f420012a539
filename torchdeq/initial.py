"""Initial states for a solve."""

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
    """Return a random initial state: each element is Gaussian or zero, with probability 1/2.

    Training from such states favours equilibria that do not depend on the initial state (path
    independence; Anil et al., 2022). A seed gives the same numbers as in torchdeq 0.1.0.

    Args:
        z_shape: the shape, batch first.
        device: the device of the state; torch's default if None.
        dtype: a floating-point dtype; torch's default if None.
        generator: the random generator, on `device`; torch's global generator if None.
    """
    z = torch.randn(tuple(z_shape), device=device, dtype=dtype, generator=generator)
    return z.mul_(torch.empty_like(z).bernoulli_(0.5, generator=generator))
