"""Inputs and dense Jacobians for the tests of losses."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return a random state that requires grad."""
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def jacobians(f: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    """Return (B, D, D) the Jacobian of each sample alone."""
    blocks = []
    for i in range(len(z)):
        full = torch.autograd.functional.jacobian(f, z[i : i + 1].detach())
        blocks.append(full.reshape(z[0].numel(), z[0].numel()))
    return torch.stack(blocks)
