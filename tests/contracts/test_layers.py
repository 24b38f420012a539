"""Layers of every family that somebody has adapted are called, or an error says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.contracts.families import NAMES, smoke


class Adapted(nn.Module):
    """A layer inside another one, which has its weights and notices calls."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer, self.called = layer, False

    @property
    def weight(self) -> torch.Tensor:
        weight: torch.Tensor = self.layer.weight
        return weight

    @property
    def bias(self) -> torch.Tensor | None:
        bias: torch.Tensor | None = self.layer.bias
        return bias

    def forward(self, x: torch.Tensor) -> Any:
        self.called = True
        return self.layer(x)


@pytest.mark.parametrize("name", NAMES)
def test_an_adapted_layer_is_called_or_an_error(name: str) -> None:
    task = smoke(name).task
    model = task.build()
    task.begin(model)
    model.train()
    batch = task.train_batch(0, 0)
    layers = {k: m for k, m in model.named_modules() if type(m) in (nn.Linear, nn.Conv2d)}
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    for path, layer in layers.items():
        if id(layer.weight) not in trained:  # an average of weights, for evaluation
            continue
        parent, _, own = path.rpartition(".")
        adapted = Adapted(layer)
        setattr(model.get_submodule(parent), own, adapted)
        said = ""
        try:
            task.loss(model, batch, None)
        except TypeError as error:
            said = str(error)
        assert adapted.called or "a plain nn.Linear or nn.Conv2d, got Adapted" in said, path
        setattr(model.get_submodule(parent), own, layer)
