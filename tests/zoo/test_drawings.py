"""Drawings: other handwriting, other paper, and the same ground again."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from deq_zoo.images.handwriting import Hand, vary_handwriting
from deq_zoo.images.paper import Paper, on_paper, on_test_paper
from deq_zoo.images.polarity import ground_of, has_other_ground, with_ground
from deq_zoo.mdeq.drawings import from_test_paper, vary_drawings

STILL = Hand(turn=0, slant=0, size=0, move=0, bend=0, thick=0)
PLAIN = Paper(tone=(0.8, 0.8), ink=(0.25, 0.25), fall=(0, 0), shade=(0, 0), grain=(0, 0),
              noise=(0, 0))  # fmt: skip


def strokes(n: int = 4, side: int = 28) -> Tensor:
    """Return drawings of an upright bar, (n, 1, side, side) from 0 to 1."""
    ink = torch.zeros(n, 1, side, side)
    ink[:, :, side // 4 : 3 * side // 4, side // 2 - 2 : side // 2 + 2] = 1
    return ink


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def middle(ink: Tensor) -> Tensor:
    """Return the centres of mass (B, 2), as row and column."""
    rows, columns = torch.meshgrid(*(torch.arange(s) for s in ink.shape[2:]), indexing="ij")
    total = ink.sum((1, 2, 3))
    return torch.stack([(ink[:, 0] * at).sum((1, 2)) / total for at in (rows, columns)], 1)


class TestHandwriting:
    def test_without_variation_drawings_stay(self) -> None:
        ink = torch.rand(3, 1, 12, 12)
        torch.testing.assert_close(vary_handwriting(ink, rng(), STILL), ink, atol=1e-5, rtol=0)

    def test_moves_are_as_large_as_allowed_and_no_larger(self) -> None:
        ink = strokes(200)
        moved = vary_handwriting(ink, rng(), Hand(0, 0, 0, move=0.1, bend=0, thick=0))
        distance = (middle(moved) - middle(ink)).abs().max(0).values
        assert (distance <= 2.8 + 0.05).all()
        assert (distance > 2.4).all()

    def test_a_turned_bar_has_the_angle_of_its_ends(self) -> None:
        ink = strokes(200)
        turned = vary_handwriting(ink, rng(), Hand(30, 0, 0, 0, 0, 0))
        torch.testing.assert_close(middle(turned), middle(ink), atol=0.2, rtol=0)
        top, bottom = middle(turned[:, :, :14]), middle(turned[:, :, 14:])
        run = bottom - top + torch.tensor([14, 0])
        angle = torch.rad2deg(torch.atan2(run[:, 1], run[:, 0])).abs()
        assert 25 < angle.max() < 33
        assert angle.min() < 3

    def test_strokes_become_wider_or_narrower(self) -> None:
        ink = strokes(100)
        changed = vary_handwriting(ink, rng(), Hand(0, 0, 0, 0, 0, thick=1))
        wide = F.max_pool2d(ink, 3, 1, 1)
        assert (changed <= wide + 1e-5).all()
        more = (changed >= ink - 1e-5).flatten(1).all(1)
        less = (changed <= ink + 1e-5).flatten(1).all(1)
        assert (more | less).all()
        assert 30 < more.sum() < 70
        assert (changed.flatten(1).amax(1) > 0.49).all()

    def test_the_generator_decides_alone(self) -> None:
        ink = strokes()
        first, again, other = (vary_handwriting(ink, rng(seed)) for seed in (1, 1, 2))
        assert torch.equal(first, again)
        assert not torch.equal(first, other)
        assert not torch.equal(first[0], first[1])
        assert 0 <= first.min() <= first.max() <= 1

    def test_wrong_arguments_are_errors(self) -> None:
        with pytest.raises(ValueError, match="floating point"):
            vary_handwriting(torch.zeros(2, 1, 8, 8, dtype=torch.uint8), rng())
        with pytest.raises(ValueError, match="thick"):
            Hand(thick=2)
        with pytest.raises(ValueError, match="move"):
            Hand(move=-1)


class TestPaper:
    def test_ink_and_paper_have_the_brightness_of_the_formula(self) -> None:
        ink = torch.rand(3, 1, 9, 7)
        expected = (255 * 0.8 * (1 - 0.75 * ink)).round().byte()
        assert torch.equal(on_paper(ink, rng(), PLAIN), expected)

    def test_light_falls_off_by_the_given_share_from_corner_to_corner(self) -> None:
        lit = Paper((1, 1), (0, 0), fall=(0.5, 0.5), shade=(0, 0), grain=(0, 0), noise=(0, 0))
        sheets = on_paper(torch.zeros(20, 1, 16, 16), rng(), lit).float() / 255
        torch.testing.assert_close(sheets.amax((1, 2, 3)), torch.ones(20), atol=0.01, rtol=0)
        torch.testing.assert_close(
            sheets.amin((1, 2, 3)), torch.full((20,), 0.5), atol=0.01, rtol=0
        )

    def test_grain_has_its_standard_deviation(self) -> None:
        grained = Paper((0.5, 0.5), (0, 0), (0, 0), (0, 0), grain=(0.1, 0.1), noise=(0, 0))
        sheets = on_paper(torch.zeros(50, 1, 28, 28), rng(), grained).float() / 255
        assert float(sheets.std()) == pytest.approx(0.05, rel=0.05)

    def test_the_test_has_its_own_seed(self) -> None:
        pixels = (255 * strokes()).byte()
        first = on_test_paper(pixels)
        torch.rand(5)
        assert torch.equal(first, on_test_paper(pixels))
        assert first.dtype == torch.uint8
        with pytest.raises(ValueError, match="floating point"):
            on_paper(pixels, rng())


class TestGrounds:
    def test_only_drawings_on_the_other_ground_are_inverted(self) -> None:
        light_ink = (255 * strokes(2)).byte()
        mixed = torch.stack([light_ink[0], 255 - light_ink[1]])
        assert torch.equal(with_ground(mixed, "dark"), light_ink)
        assert torch.equal(with_ground(mixed, "light"), 255 - light_ink)
        assert not has_other_ground(torch.full((1, 8, 8), 90, dtype=torch.uint8), "dark")

    def test_pictures_on_paper_are_shown_with_a_dark_ground(self) -> None:
        read = from_test_paper((255 * strokes(40)).byte()).float()
        on_bar = (read * strokes(40)).sum((1, 2, 3)) / strokes(40).sum((1, 2, 3))
        assert (on_bar > read.mean((1, 2, 3)) + 40).all()

    def test_even_light_hides_no_ground_but_a_photograph_has_none(self) -> None:
        ramp = torch.linspace(90, 250, 28).expand(1, 28, 28)
        drawn = torch.where(strokes(1)[0] > 0, 20.0, ramp).byte()
        assert ground_of(drawn) == "light"
        assert ground_of(255 - drawn) == "dark"
        assert ground_of(ramp.byte()) is None
        assert ground_of((torch.rand(1, 28, 28, generator=rng()) * 255).byte()) is None
        assert ground_of(torch.zeros(3, 1, 1, dtype=torch.uint8)) is None

    def test_training_shows_half_of_the_drawings_on_paper(self) -> None:
        varied = vary_drawings((255 * strokes(400)).byte(), rng())
        assert varied.dtype == torch.uint8
        corners = varied[:, 0, :3, :3].float().std((1, 2))
        assert 140 < (corners > 0).sum() < 260  # paper has grain, everything else has none
