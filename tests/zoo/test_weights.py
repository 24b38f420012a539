"""Weights that fit a model, and errors for those that do not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deq_zoo.errors import CheckpointError
from deq_zoo.weights import check_fits, load_weights
from torchdeq import apply_norm


@pytest.mark.parametrize("norm", ["weight_norm", "spectral_norm"])
def test_plain_weights_fit_a_normalised_model(norm: str) -> None:
    plain, model = nn.Linear(3, 2), nn.Linear(3, 2)
    apply_norm(model, norm)
    check_fits(plain.state_dict(), model.state_dict(), "it")
    load_weights(model, plain.state_dict(), "it")
    both = plain.state_dict() | model.state_dict()
    with pytest.raises(CheckpointError, match=r"^both does not fit the model: .*lacks, weight$"):
        load_weights(model, both, "both")


def test_every_kind_of_misfit_is_named() -> None:
    weights = {f"a{k}": torch.zeros(1) for k in range(5)} | {"shape": torch.zeros(2, 3)}
    expected = {"b": torch.zeros(1), "shape": torch.zeros(3, 2)}
    with pytest.raises(CheckpointError) as error:
        check_fits(weights, expected, "x.pth", "Build another.")
    assert str(error.value) == (
        "x.pth does not fit the model: it lacks b; it has, and the model lacks, a0, a1, a2 and 2 "
        "more; shape is (2, 3), the model's is (3, 2). Build another."
    )
