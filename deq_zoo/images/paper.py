"""Drawings as a camera would see them on paper: dark ink, grain, uneven light.

The test of digits on paper draws from here, with a seed of its own; see `on_test_paper`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

TEST_SEED = 20_240


@dataclass(frozen=True)
class Paper:
    """Ranges from which the look of a sheet is drawn, uniformly.

    Args:
        tone: brightness of the paper in full light, from 0 to 1.
        ink: brightness of ink relative to the paper under it.
        fall: share of the light that is missing at the dark edge of the picture.
        shade: share of the light that soft shadows take, at most.
        grain: standard deviation of the paper's grain, relative to its brightness.
        noise: standard deviation of the camera's noise.
    """

    tone: tuple[float, float] = (0.75, 1.0)
    ink: tuple[float, float] = (0.05, 0.35)
    fall: tuple[float, float] = (0.2, 0.6)
    shade: tuple[float, float] = (0.0, 0.2)
    grain: tuple[float, float] = (0.02, 0.06)
    noise: tuple[float, float] = (0.0, 0.02)


#: The sheets of the test.
TEST_PAPER = Paper()


def on_paper(ink: Tensor, rng: torch.Generator, paper: Paper | None = None) -> Tensor:
    """Return pictures (B, 1, H, W) of drawings on paper, as bytes: dark ink on a light ground.

    Args:
        ink: (B, 1, H, W), from 0 for the ground to 1 for ink.
        rng: of grain, light and tones.
        paper: the ranges they are drawn from.
    """
    if ink.dim() != 4 or ink.shape[1] != 1 or not ink.is_floating_point():
        raise ValueError(
            f"drawings must be floating point (B, 1, H, W), got {ink.dtype} {tuple(ink.shape)}"
        )
    paper, n = Paper() if paper is None else paper, len(ink)
    light = _light(ink, paper, rng)
    sheet = _within(paper.tone, n, rng) * (1 + _grain(ink, paper, rng))
    written = sheet * (1 - ink * (1 - _within(paper.ink, n, rng)))
    noise = _within(paper.noise, n, rng) * torch.randn(ink.shape, generator=rng)
    return ((light * written + noise).clamp(0, 1) * 255).round().byte()


def on_test_paper(pixels: Tensor) -> Tensor:
    """Return test images, light ink on a dark ground, as pictures of dark ink on paper.

    The same images give the same pictures, whatever was drawn before.

    Args:
        pixels: (B, 1, H, W) bytes.
    """
    rng = torch.Generator().manual_seed(TEST_SEED)
    return on_paper(pixels.float() / 255, rng, TEST_PAPER)


def _light(ink: Tensor, paper: Paper, rng: torch.Generator) -> Tensor:
    """Return (B, 1, H, W) light from 0 to 1: it falls off in one direction, with soft shadows."""
    n, _, height, width = ink.shape
    angle = 2 * torch.pi * torch.rand(n, 1, 1, generator=rng)
    down, across = torch.linspace(-1, 1, height), torch.linspace(-1, 1, width)
    ramp = angle.cos() * across + angle.sin() * down[:, None]
    ramp = (ramp / (angle.cos().abs() + angle.sin().abs()) + 1) / 2  # from 0 to 1 at the corners
    shadows = F.interpolate(
        torch.rand(n, 1, 3, 3, generator=rng), size=(height, width), mode="bilinear",
        align_corners=True,
    )  # fmt: skip
    fall, shade = _within(paper.fall, n, rng), _within(paper.shade, n, rng)
    return (1 - fall * ramp[:, None]) * (1 - shade * shadows)


def _grain(ink: Tensor, paper: Paper, rng: torch.Generator) -> Tensor:
    """Return (B, 1, H, W) grain, half of it in single pixels and half in larger fibres."""
    n, _, height, width = ink.shape
    fine = torch.randn(ink.shape, generator=rng)
    coarse = torch.randn(n, 1, -(-height // 2), -(-width // 2), generator=rng)
    coarse = F.interpolate(coarse, size=(height, width), mode="bilinear", align_corners=False)
    # Interpolation has made the coarse part weaker: back to a standard deviation of 1.
    return _within(paper.grain, n, rng) * (fine + coarse / coarse.std()) / 2**0.5


def _within(range_: tuple[float, float], n: int, rng: torch.Generator) -> Tensor:
    low, high = range_
    return low + (high - low) * torch.rand(n, 1, 1, 1, generator=rng)
