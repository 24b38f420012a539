"""MDEQ: multiscale equilibrium networks for images (Bai et al., 2020)."""

from deq_zoo.mdeq.layers import MultiscaleMap, Pyramid
from deq_zoo.mdeq.model import (
    DIGITS,
    IMAGENET_SMALL,
    LARGE,
    MDEQ,
    TINY,
    MDEQClassifier,
    MDEQConfig,
    MDEQSegmenter,
)

__all__ = [
    "DIGITS",
    "IMAGENET_SMALL",
    "LARGE",
    "MDEQ",
    "TINY",
    "MDEQClassifier",
    "MDEQConfig",
    "MDEQSegmenter",
    "MultiscaleMap",
    "Pyramid",
]
