"""Images that are made by rule, for tests."""

from __future__ import annotations

import torch

from deq_zoo.images.labelled import Channels, Images
from deq_zoo.mdeq.config import MDEQConfig
from deq_zoo.task import generator

NOISE_SIDE = 8


def bright_quarters(split: str, net: MDEQConfig) -> Images:
    """Return a few images whose class is their brightest quarter."""
    rng = generator("noise", split)
    labels = torch.randint(min(4, net.classes), (64,), generator=rng)
    shape = (64, net.in_channels, NOISE_SIDE, NOISE_SIDE)
    pixels = torch.randint(0, 120, shape, generator=rng, dtype=torch.uint8)
    for image, label in zip(pixels, labels, strict=True):
        top, left = 4 * (int(label) // 2), 4 * (int(label) % 2)
        image[:, top : top + 4, left : left + 4] += 120
    names = tuple(str(k) for k in range(net.classes))
    spread = (0.5,) * net.in_channels
    return Images(pixels, labels, names, Channels(spread, spread))
