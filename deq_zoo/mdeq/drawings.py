"""Drawings on a dark ground for a classifier that should read them from paper, too."""

from __future__ import annotations

import torch
from torch import Tensor

from deq_zoo.images.handwriting import vary_handwriting
from deq_zoo.images.paper import on_paper, on_test_paper
from deq_zoo.images.polarity import with_ground

_ON_PAPER = 0.5  # share of training images that are shown on paper
_NEGATIVE = 0.1  # share of training images with light and dark exchanged


def vary_drawings(pixels: Tensor, rng: torch.Generator) -> Tensor:
    """Return training images with other shapes, half of them on paper, some of them as negatives.

    Args:
        pixels: (B, 1, H, W) bytes, light ink on a dark ground.
        rng: of all changes.
    """
    ink = vary_handwriting(pixels.float() / 255, rng)
    on_sheet = _chosen(_ON_PAPER, len(ink), rng)
    drawn = torch.where(on_sheet, 255 - on_paper(ink, rng), (ink * 255).round().byte())
    return torch.where(_chosen(_NEGATIVE, len(ink), rng), 255 - drawn, drawn)


def from_test_paper(pixels: Tensor) -> Tensor:
    """Return test images as pictures on paper, in the form in which `predict` shows them to a net.

    Args:
        pixels: (B, 1, H, W) bytes, light ink on a dark ground.
    """
    return with_ground(on_test_paper(pixels), "dark")


def _chosen(share: float, n: int, rng: torch.Generator) -> Tensor:
    return torch.rand(n, 1, 1, 1, generator=rng) < share
