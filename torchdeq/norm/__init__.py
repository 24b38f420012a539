"""Norms of weights, computed once per forward pass."""

from torchdeq.norm import base_norm, spectral_norm, weight_norm
from torchdeq.norm.apply import (
    apply_norm,
    register_norm,
    register_norm_module,
    remove_norm,
    reset_norm,
)
from torchdeq.norm.base import NORMS, Norm
from torchdeq.norm.spectral import SpectralNorm
from torchdeq.norm.weight import WeightNorm

NORMS.seal()

__all__ = [
    "NORMS",
    "Norm",
    "SpectralNorm",
    "WeightNorm",
    "apply_norm",
    "base_norm",
    "register_norm",
    "register_norm_module",
    "remove_norm",
    "reset_norm",
    "spectral_norm",
    "weight_norm",
]
