"""MDEQ: multiscale equilibrium networks for images (Bai et al., 2020)."""

from typing import TYPE_CHECKING

from deq_zoo.lazy import lazy_names

if TYPE_CHECKING:
    from deq_zoo.mdeq.config import DIGITS, IMAGENET_SMALL, LARGE, TINY, MDEQConfig
    from deq_zoo.mdeq.layers import MultiscaleMap, Pyramid
    from deq_zoo.mdeq.model import MDEQ, MDEQClassifier, MDEQSegmenter
    from deq_zoo.mdeq.prediction import Classes

__all__ = [
    "DIGITS",
    "IMAGENET_SMALL",
    "LARGE",
    "MDEQ",
    "TINY",
    "Classes",
    "MDEQClassifier",
    "MDEQConfig",
    "MDEQSegmenter",
    "MultiscaleMap",
    "Pyramid",
]

__getattr__ = lazy_names(
    __name__,
    {
        "Classes": "prediction",
        "DIGITS": "config",
        "IMAGENET_SMALL": "config",
        "LARGE": "config",
        "MDEQ": "model",
        "MDEQClassifier": "model",
        "MDEQConfig": "config",
        "MDEQSegmenter": "model",
        "MultiscaleMap": "layers",
        "Pyramid": "layers",
        "TINY": "config",
    },
)
