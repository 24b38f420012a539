"""Layers for the tests of norms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchdeq.norm import apply_norm, reset_norm

MODULES: list[Callable[[], Any]] = [
    lambda: nn.Linear(5, 4),
    lambda: nn.Conv1d(2, 4, 3),
    lambda: nn.Conv2d(2, 4, 3),
    lambda: nn.Conv3d(2, 3, 2),
    lambda: nn.ConvTranspose1d(2, 4, 3),
    lambda: nn.ConvTranspose2d(2, 4, 3),
    lambda: nn.ConvTranspose3d(2, 3, 2),
]
every_norm = pytest.mark.parametrize("norm_type", ["weight_norm", "spectral_norm"])


def normalised(norm_type: str, forward: bool = True, **options: Any) -> Any:
    layer = nn.Linear(5, 4)
    apply_norm(layer, norm_type, **options)
    if forward:
        reset_norm(layer)
        layer(torch.randn(2, 5)).sum().backward()
        layer.zero_grad()
    return layer


def raw(layer: Any) -> Tensor:
    """The parameter behind the weight."""
    result: Tensor = layer.weight_orig if hasattr(layer, "weight_orig") else layer.weight_v
    return result
