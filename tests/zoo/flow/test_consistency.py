"""Pixels that a flow back confirms."""

from __future__ import annotations

import pytest
import torch

from deq_zoo.flow import consistent, warped
from deq_zoo.flow.layers import pixel_grid


def test_a_frame_is_seen_from_the_other() -> None:
    image = torch.rand(1, 3, 6, 9)
    flow = torch.zeros(1, 2, 6, 9)
    flow[:, 0], flow[:, 1] = 2, -1
    result = warped(image, flow)
    torch.testing.assert_close(result[..., 1:, :-2], image[..., :-1, 2:], atol=1e-6, rtol=0)
    torch.testing.assert_close(warped(image, 0 * flow), image, atol=1e-6, rtol=0)


def test_what_is_hidden_or_leaves_the_frame_is_not_consistent() -> None:
    # A square of four pixels moves by three to the right over a still ground.
    forward, backward = torch.zeros(2, 1, 2, 12, 14)
    forward[0, 0, 4:8, 3:7] = 3
    backward[0, 0, 4:8, 6:10] = -3
    seen = consistent(forward, backward)[0]
    hidden = torch.zeros(12, 14, dtype=torch.bool)
    hidden[4:8, 7:10] = True  # ground that the square covers
    assert torch.equal(seen, ~hidden)
    away = torch.full((1, 2, 12, 14), 2.0)
    x, y = (pixel_grid(away) + away)[0]
    assert torch.equal(consistent(away, -away)[0], (x <= 13) & (y <= 11))


def test_wrong_shapes_are_errors() -> None:
    with pytest.raises(ValueError, match="its flow"):
        warped(torch.zeros(1, 3, 4, 4), torch.zeros(1, 2, 4, 5))
