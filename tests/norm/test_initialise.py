"""Initialisers that run after apply_norm reach the parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.norm.layers import MODULES, SIZES, every_norm, normalised, raw
from torchdeq.norm import NORMS, apply_norm, reset_norm


def applied(norm_type: str, weight: Tensor, dim: int = 0) -> Tensor:
    """Return the weight of a layer after apply_norm: unchanged, or scaled to the norm 1."""
    if NORMS[norm_type].keeps_weight:
        return weight
    return weight / SIZES[norm_type](weight.movedim(dim, 0).flatten(1))


@every_norm
@pytest.mark.parametrize("make", MODULES)
def test_reset_parameters_reaches_the_parameters(norm_type: str, make: Callable[[], Any]) -> None:
    layer = make()
    apply_norm(layer, norm_type)
    for forward_passes in range(3):
        for _ in range(forward_passes):
            reset_norm(layer)
        layer.reset_parameters()
        wanted = layer.weight.detach().clone()
        reset_norm(layer)
        dim = 1 if "Transpose" in type(layer).__name__ else 0
        torch.testing.assert_close(layer.weight, applied(norm_type, wanted, dim))
        assert torch.equal(raw(layer), wanted)
        assert all(p.is_leaf for p in layer.parameters())


INITIALISERS: list[Callable[[Any], Any]] = [
    lambda layer: nn.init.normal_(layer.weight, 0, 0.01),
    lambda layer: nn.init.orthogonal_(layer.weight),
    lambda layer: layer.apply(lambda m: nn.init.constant_(m.weight, 0.3)),
    lambda layer: layer.weight.data.normal_(0, 0.01),
    lambda layer: layer.weight.data[0].mul_(0.5),
    lambda layer: setattr(layer.weight, "data", torch.full((4, 5), 0.2)),
    lambda layer: setattr(layer, "weight", nn.Parameter(torch.randn(4, 5))),
]


@every_norm
@pytest.mark.parametrize("initialise", INITIALISERS)
def test_every_initialiser_after_apply_norm_counts(
    norm_type: str, initialise: Callable[[Any], Any]
) -> None:
    layer = normalised(norm_type, forward=False)
    names = [name for name, _ in layer.named_parameters()]
    initialise(layer)
    wanted = layer.weight.detach().clone()
    saved = {k: v.clone() for k, v in copy.deepcopy(layer).state_dict().items()}
    x = torch.randn(3, 5)
    torch.testing.assert_close(layer(x), nn.functional.linear(x, wanted, layer.bias))
    reset_norm(layer)
    torch.testing.assert_close(layer.weight, applied(norm_type, wanted))
    assert torch.equal(raw(layer), wanted)
    assert [name for name, _ in layer.named_parameters()] == names
    for (
        key,
        value,
    ) in layer.state_dict().items():  # as in a copy made before the reset
        torch.testing.assert_close(value, saved[key])


@every_norm
def test_without_a_learnable_scale_an_initialiser_sets_the_direction(norm_type: str) -> None:
    layer = normalised(norm_type, learn_scale=False, target_norm=0.5)
    nn.init.orthogonal_(layer.weight, gain=7)
    wanted = layer.weight.detach() * 0.5 / 7
    reset_norm(layer)
    torch.testing.assert_close(layer.weight, wanted)


@every_norm
def test_an_initialiser_survives_a_move_before_the_first_forward_pass(norm_type: str) -> None:
    for write in (nn.init.normal_, lambda w: w.data.normal_()):
        layer = normalised(norm_type, forward=False)
        write(layer.weight)
        wanted = layer.weight.detach().double()
        layer.double()
        reset_norm(layer)
        torch.testing.assert_close(layer.weight, applied(norm_type, wanted), rtol=1e-6, atol=1e-6)


@every_norm
def test_initialising_the_parameters_themselves_is_not_undone(norm_type: str) -> None:
    layer = normalised(norm_type, forward=False)
    for p in layer.parameters():
        p.data.uniform_(0.1, 1)
    wanted = raw(layer).clone()
    reset_norm(layer)
    assert torch.equal(raw(layer), wanted)


def assert_write_is_dropped(layer: nn.Linear) -> None:
    """Assert that a reset keeps the parameters, and warns of the write to the weight."""
    wanted = raw(layer).clone()
    with pytest.warns(UserWarning, match="the write is dropped; call reset_norm"):
        reset_norm(layer)
    assert torch.equal(raw(layer), wanted)


@every_norm
def test_a_write_after_the_parameters_moved_is_dropped_with_a_warning(norm_type: str) -> None:
    layer = normalised(norm_type)
    with torch.no_grad():
        raw(layer).add_(1)  # an optimizer's step
        layer.weight.clamp_(max=0.1)
    assert_write_is_dropped(layer)


@every_norm
def test_weights_loaded_through_data_win_over_an_initialiser(norm_type: str) -> None:
    layer = normalised(norm_type, forward=False)
    nn.init.normal_(layer.weight)
    for p in layer.parameters():  # a checkpoint, or an average of weights
        p.data.uniform_(0.1, 1)
    assert_write_is_dropped(layer)


@every_norm
def test_what_autograd_sees_lasts_until_the_next_reset(norm_type: str) -> None:
    for fresh in (True, False):
        layer = normalised(norm_type, forward=False)
        if not fresh:
            reset_norm(layer)
        wanted = raw(layer).clone()
        layer.weight.mul_(2)  # recorded
        layer.weight.sum().backward()
        reset_norm(layer)
        layer.weight = layer.weight + 1  # assigned
        reset_norm(layer)
        assert torch.equal(raw(layer), wanted)


def test_a_write_through_data_within_a_forward_pass_is_straight_through() -> None:
    layer = normalised("weight_norm")
    before = raw(layer).clone()
    layer.weight.data.clamp_(max=0.1)
    assert layer.weight.max() <= 0.1
    reset_norm(layer)
    assert torch.equal(raw(layer), before)
    torch.testing.assert_close(layer.weight, before)


def test_a_parameter_of_another_shape_is_refused() -> None:
    layer = normalised("weight_norm")
    layer.weight = nn.Parameter(torch.randn(4, 6))
    with pytest.raises(ValueError, match=r"given the shape \(4, 6\).*remove_norm"):
        reset_norm(layer)
