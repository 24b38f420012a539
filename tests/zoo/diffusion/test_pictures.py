"""The pictures of the report: their captions, and what they cost."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from deq_zoo.diffusion import ChainConfig, InversionConfig
from deq_zoo.diffusion.data import InMemory
from deq_zoo.diffusion.model import CIFAR10, UNetConfig
from deq_zoo.diffusion.pictures import draw_pictures
from deq_zoo.diffusion.plan import ChainPlan
from deq_zoo.diffusion.presets import diffusion_cifar10
from deq_zoo.diffusion.task import Denoise
from tests.zoo.diffusion.smoke import make_model, make_task


class Large(nn.Module):
    """A network that counts its evaluations and claims to have many parameters."""

    config = replace(CIFAR10, size=4, widths=(32,))
    device = torch.device("cpu")

    def __init__(self, config: UNetConfig = CIFAR10) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1).expand(35_000_000))
        self.evaluations = 0

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        self.evaluations += len(x)
        return 0.1 * x

    def place(self, t: Tensor) -> Tensor:
        return t


def test_the_report_of_the_cifar10_preset_takes_2000_evaluations_at_most() -> None:
    """Earlier versions took 22,000, an hour on a CPU."""
    task = diffusion_cifar10().task
    assert isinstance(task, Denoise)
    model = Large().eval()
    images = InMemory(torch.zeros(10, 3, 4, 4, dtype=torch.uint8))
    pictures = draw_pictures(model, task.plan, images)
    assert [picture.name for picture in pictures] == ["samples", "rounds", "inversions"]
    assert 100 < model.evaluations <= 2000


def test_captions_say_what_is_shown_and_how_it_was_chosen() -> None:
    samples, rounds, inversions = make_task().pictures(make_model())
    assert "16 random noises (seed 1, none left out)" in samples.caption
    assert "chain of 10 steps" in samples.caption
    assert "rounds of plain iteration" in rounds.caption
    assert "2 test images drawn at random" in inversions.caption
    assert "dB" in inversions.caption


@pytest.mark.parametrize(("wanted", "available"), [(0, 3), (8, 3), (8, 0)])
def test_few_images_make_pictures_too(wanted: int, available: int) -> None:
    plan = ChainPlan(chain=ChainConfig(steps=1), inversion=InversionConfig(images=wanted, steps=1))
    images = InMemory(torch.zeros(available, 1, 8, 8, dtype=torch.uint8))
    pictures = draw_pictures(make_model(), plan, images)
    expected = ["samples", "rounds"] + ["inversions"] * bool(wanted and available)
    assert [picture.name for picture in pictures] == expected
