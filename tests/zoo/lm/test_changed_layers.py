"""Layers that somebody has changed (adapters, hooks, quantisation) are called, in every design."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from deq_zoo.lm.language_model import LanguageModel
from tests.zoo.lm.attractor import nets as attractors
from tests.zoo.lm.nets import DESIGNS, draw_ids, make_model

ALL = [*DESIGNS, "attractor"]


class Adapted(nn.Module):
    """A linear layer with a learnt correction of rank one beside it, as adapters have."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Parameter(torch.full((layer.in_features, 1), 0.03).to(layer.weight))
        self.up = nn.Parameter(torch.linspace(-0.1, 0.1, layer.out_features).to(layer.weight))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) + x @ self.down * self.up
        return out


def make(design: str) -> LanguageModel:
    plain: dict[str, Any] = {"norm_type": "none"}
    if design == "attractor":
        return attractors.make_model()
    deq = {"f_max_iter": 0, "grad": 4} if design == "redesigned" else {"f_max_iter": 60}
    return make_model(design, plain | deq)


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: each for name, each in model.named_modules() if isinstance(each, nn.Linear)}


def replace(model: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, layer)


@pytest.mark.parametrize("design", ALL)
@torch.no_grad()
def test_a_hook_of_any_layer_sees_its_calls(design: str) -> None:
    model, ids = make(design), draw_ids()
    expected = model.log_prob(model(ids).z)
    seen: set[str] = set()
    for name, layer in linear_layers(model).items():
        layer.register_forward_hook(lambda *_, name=name: seen.add(name))
    model.get_submodule("vocabulary").register_forward_hook(lambda *_: seen.add("vocabulary"))
    assert_close(model.log_prob(model(ids).z), expected, atol=1e-9, rtol=0)
    assert seen == {*linear_layers(model), "vocabulary"}


@pytest.mark.parametrize("design", ALL)
def test_adapters_act_as_their_merged_weights_and_get_gradients(design: str) -> None:
    model, merged, ids = make(design), make(design), draw_ids()
    adapters = {}
    for name, layer in linear_layers(model).items():
        adapters[name] = Adapted(layer)
        replace(model, name, adapters[name])
    with torch.no_grad():
        for name, layer in linear_layers(merged).items():
            layer.weight += (adapters[name].down * adapters[name].up).T
    out = model.log_prob(model(ids).z)
    assert_close(out, merged.log_prob(merged(ids).z), atol=1e-7, rtol=0)
    out.square().mean().backward()
    for name, adapter in adapters.items():
        assert adapter.up.grad is not None, name
        assert bool(adapter.up.grad.any()), name
