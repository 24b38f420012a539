"""Handwriting as other hands would write it: bent, turned, moved, thicker or thinner."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from deq_zoo.checks import check_fields

_COARSE = 4  # points along a side at which a drawing is bent


@dataclass(frozen=True)
class Hand:
    """How much drawings vary; every amount is drawn uniformly between its negative and itself.

    Args:
        turn: rotation in degrees.
        slant: horizontal shift of the top against the bottom, relative to the height.
        size: relative change of the size, of height and width on their own.
        move: shift, relative to the side of the image.
        bend: shift of each of a few points against the others, relative to the side.
        thick: 1 widens strokes by a pixel on both sides, -1 narrows them by half as much.
    """

    turn: float = 15.0
    slant: float = 0.2
    size: float = 0.15
    move: float = 0.08
    bend: float = 0.035
    thick: float = 0.6

    def __post_init__(self) -> None:
        check_fields(self, 0, *(field.name for field in fields(self)), finite=True)
        if self.thick > 1:
            raise ValueError(f"thick must lie from 0 to 1, got {self.thick}")


def vary_handwriting(ink: Tensor, rng: torch.Generator, hand: Hand | None = None) -> Tensor:
    """Return drawings, each changed at random in shape, place and thickness of its strokes.

    Args:
        ink: (B, 1, H, W), from 0 for the ground to 1 for ink.
        rng: of the changes.
        hand: how large they are.
    """
    if ink.dim() != 4 or ink.shape[1] != 1 or not ink.is_floating_point():
        raise ValueError(
            f"drawings must be floating point (B, 1, H, W), got {ink.dtype} {tuple(ink.shape)}"
        )
    hand = Hand() if hand is None else hand
    where = F.affine_grid(_maps(len(ink), hand, rng), list(ink.shape), align_corners=False)
    # A side of the image is 2 in the coordinates of a grid.
    bend = _amounts((len(ink), 2, _COARSE, _COARSE), 2 * hand.bend, rng)
    bend = F.interpolate(bend, size=ink.shape[2:], mode="bicubic", align_corners=True)
    bent = F.grid_sample(ink, where + bend.permute(0, 2, 3, 1), align_corners=False)
    return _with_thickness(bent, _amounts((len(ink), 1, 1, 1), hand.thick, rng)).clamp(0, 1)


def _maps(n: int, hand: Hand, rng: torch.Generator) -> Tensor:
    """Return (n, 2, 3) affine maps from places of the result to places of the drawing."""
    angle = torch.deg2rad(_amounts((n,), hand.turn, rng))
    wide, high = (torch.exp(_amounts((n,), hand.size, rng)) for _ in range(2))
    slant = _amounts((n,), hand.slant, rng)
    turn = torch.stack((angle.cos(), -angle.sin(), angle.sin(), angle.cos()), 1).view(n, 2, 2)
    shape = torch.stack((wide, slant, torch.zeros(n), high), 1).view(n, 2, 2)
    return torch.cat((turn @ shape, _amounts((n, 2, 1), 2 * hand.move, rng)), dim=2)


def _with_thickness(ink: Tensor, amount: Tensor) -> Tensor:
    """Return drawings between themselves and their widened (above 0) or narrowed strokes."""
    wide, narrow = F.max_pool2d(ink, 3, 1, 1), -F.max_pool2d(-ink, 3, 1, 1)
    # A stroke of one pixel would vanish if it were narrowed, so at most half of the way.
    share = torch.where(amount > 0, amount, -amount / 2)
    return ink.lerp(torch.where(amount > 0, wide, narrow), share)


def _amounts(shape: tuple[int, ...], largest: float, rng: torch.Generator) -> Tensor:
    return (2 * torch.rand(shape, generator=rng) - 1) * largest
