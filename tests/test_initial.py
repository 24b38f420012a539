"""Random starts."""

from __future__ import annotations

import pytest
import torch

from torchdeq.initial import mixed_init


def test_half_of_the_elements_are_gaussian_and_half_are_zero() -> None:
    z = mixed_init((200, 500))
    zero = z == 0
    assert abs(zero.float().mean().item() - 0.5) < 0.01
    kept = z[~zero]
    assert abs(kept.mean().item()) < 0.02
    assert abs(kept.std().item() - 1) < 0.02


def test_draws_what_0_1_0_draws() -> None:
    torch.manual_seed(5)
    gaussian = torch.randn(3, 4, 5)
    expected = gaussian * torch.zeros(3, 4, 5).bernoulli_(0.5)
    torch.manual_seed(5)
    assert torch.equal(mixed_init((3, 4, 5)), expected)


@pytest.mark.parametrize("shape", [(2, 3), [2, 3], torch.Size([2, 3]), (0, 3), ()])
def test_takes_any_shape(shape: tuple[int, ...]) -> None:
    assert mixed_init(shape).shape == torch.Size(shape)


def test_dtype_device_and_generator_are_the_callers() -> None:
    def draw() -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        return mixed_init((4, 4), torch.device("cpu"), dtype=torch.float64, generator=generator)

    before = torch.get_rng_state()
    first, second = draw(), draw()
    assert torch.equal(first, second)
    assert first.dtype == torch.float64
    assert torch.equal(before, torch.get_rng_state())
    assert mixed_init((2,), dtype=torch.bfloat16).dtype == torch.bfloat16
    assert not mixed_init((2,)).requires_grad
