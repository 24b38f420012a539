"""Evaluations of f in use and in training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from deq_zoo.flow import DEQFlow, FlowConfig
from deq_zoo.flow.budget import budget_note, training_evaluations
from deq_zoo.flow.predict import predict_files
from deq_zoo.predictions import OutFolder, Prediction
from deq_zoo.preset import find_preset
from tests.zoo.flow.inputs import write_frames
from torchdeq import DEQConfig, get_deq


@pytest.mark.parametrize(
    "options",
    [
        {"f_max_iter": 4, "n_states": 2, "grad": 1},
        {"f_max_iter": 6, "n_states": 2, "grad": [1, 3]},
        {"f_max_iter": 6, "n_states": 3, "grad": 2, "core": "indexing"},
        {"f_max_iter": 0, "grad": 5},
        {"f_max_iter": 6, "indexing": [2], "grad": 1},
    ],
)
def test_the_evaluations_of_training_are_those_on_the_way_to_the_last_state(
    options: dict[str, Any],
) -> None:
    deq = DEQConfig(f_solver="simple_fixed_point_iter", on_failure="ignore", **options)
    z0 = torch.zeros(1, 1)
    states, _ = get_deq(deq).train()(lambda z: z + 1, z0)  # a state counts its evaluations
    assert training_evaluations(deq)[-1] == int(states[-1])


def test_a_budget_unlike_that_of_training_is_named(tmp_path: Path) -> None:
    deq = DEQConfig(f_solver="simple_fixed_point_iter", f_max_iter=4, n_states=2, grad=[1])
    assert [budget_note(deq.with_options(eval_f_max_iter=n)) == "" for n in (3, 4, 6, 7)] == [
        False, True, True, False
    ]  # fmt: skip
    model = DEQFlow(FlowConfig(size="nano"), deq.with_options(eval_f_max_iter=12)).eval()
    (result,) = predict_files(model, write_frames(tmp_path, 2), OutFolder(tmp_path / "out"))
    assert isinstance(result, Prediction)
    assert "12 evaluations; its budget is 12 evaluations, training makes 6" in result.text


@pytest.mark.parametrize("name", ["flow-quick", "flow-smoke", "flow-things-b", "flow-chairs-h"])
def test_presets_use_as_many_evaluations_as_they_train_with(name: str) -> None:
    assert budget_note(find_preset(name).task.deq) == ""
