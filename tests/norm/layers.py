"""Layers and reference formulas for the tests of norms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchdeq.norm import NORMS, apply_norm, reset_norm

MODULES: list[Callable[[], Any]] = [
    lambda: nn.Linear(5, 4),
    lambda: nn.Conv1d(2, 4, 3),
    lambda: nn.Conv2d(2, 4, 3),
    lambda: nn.Conv3d(2, 3, 2),
    lambda: nn.ConvTranspose1d(2, 4, 3),
    lambda: nn.ConvTranspose2d(2, 4, 3),
    lambda: nn.ConvTranspose3d(2, 3, 2),
]
every_norm = pytest.mark.parametrize("norm_type", list(NORMS))

#: The norm N(V) of a matrix V, for each registered norm.
SIZES: dict[str, Callable[[Tensor], Tensor]] = {
    "weight_norm": lambda V: V.square().sum(1, keepdim=True).sqrt(),
    "spectral_norm": lambda V: torch.linalg.matrix_norm(V, 2),
}


def normalised(norm_type: str, forward: bool = True, **options: Any) -> Any:
    """Return a layer with a norm, by default after one forward and backward pass."""
    layer = nn.Linear(5, 4)
    apply_norm(layer, norm_type, **options)
    if forward:
        reset_norm(layer)
        layer(torch.randn(2, 5)).sum().backward()
        layer.zero_grad()
    return layer


def raw(layer: Any) -> Tensor:
    """Return the parameter V behind the weight."""
    V: Tensor = getattr(layer, f"weight_{layer._deq_norm.raw}")
    return V
