"""Frames for tests of the models, and promises that all of them keep."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.testing import assert_close

from deq_zoo.flow import DEQFlow


def draw_frames(N: int = 1, height: int = 64, width: int = 64) -> tuple[Tensor, Tensor]:
    pixels = torch.randint(256, (2, N, 3, height, width), dtype=torch.uint8)
    return pixels[0], pixels[1]


def assert_pairs_are_independent(model: DEQFlow) -> None:
    """Assert that the flow of a pair does not depend on its batch; batches may be empty."""
    a, b = draw_frames(3, 64, 72)
    together = model((a, b)).prediction
    for k in range(3):
        alone = model((a[k : k + 1], b[k : k + 1])).prediction
        assert_close(alone[0], together[k], atol=1e-9, rtol=0)
    assert model((a[:0], b[:0])).prediction.shape == (0, 2, 64, 72)
