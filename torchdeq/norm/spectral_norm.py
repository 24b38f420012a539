"""Published import path of spectral normalisation."""

from torchdeq.norm.spectral import SpectralNorm

__all__ = ["SpectralNorm"]
