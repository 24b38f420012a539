"""Published import path of weight normalisation."""

from torchdeq.norm.weight import WeightNorm

__all__ = ["WeightNorm"]
