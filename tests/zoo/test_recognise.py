"""The reading of drawn digits by a classifier, for the card of the denoiser."""

from __future__ import annotations

import torch

from deq_zoo.images.labelled import Images
from deq_zoo.images.mnist import MNIST_CHANNELS
from tools.recognise import Read, recognised, some_of_each


def test_only_sure_readings_count() -> None:
    found = Read(torch.tensor([3, 3, 7, 1]), torch.tensor([0.95, 0.5, 0.91, 0.9]))
    shares = recognised(found)
    assert shares["called one digit with probability above 0.9, %"] == 50
    assert shares["different digits among these"] == 2
    assert shares["of each digit, 0 to 9"] == "0, 0, 0, 1, 0, 0, 0, 1, 0, 0"


def test_some_of_each_class_are_taken_in_order() -> None:
    labels = torch.tensor([1, 0, 1, 0, 1])
    pixels = torch.arange(5, dtype=torch.uint8)[:, None, None, None]
    taken = some_of_each(Images(pixels, labels, ("0", "1"), MNIST_CHANNELS), 2)
    assert taken.pixels.flatten().tolist() == [1, 3, 0, 2]
