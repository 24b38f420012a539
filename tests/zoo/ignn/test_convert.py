"""Weights of the authors: there and back, sizes from the weights, no data set needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import deq_zoo
from deq_zoo.cli import main
from deq_zoo.convert import convert_file
from deq_zoo.errors import CheckpointError, DataError
from deq_zoo.ignn import GraphIGNN, IGNNConfig, NodeIGNN, SkipIGNN
from deq_zoo.ignn.convert import from_authors, read_sizes, to_authors
from deq_zoo.ignn.set_task import GraphClassTask, TissueTask
from deq_zoo.ignn.task import NodeLabelTask, NodeTask
from deq_zoo.preset import Preset, find_preset
from deq_zoo.weights import load_weights
from tests.zoo.ignn.problems import TIGHT
from torchdeq import DEQConfig

CLIPPED: dict[str, Any] = {"norm_type": "spectral_norm", "norm_clip": True}
NORMS = ["none", "weight_norm", "spectral_norm"]
TASKS: list[Any] = [
    TissueTask,
    NodeLabelTask,
    lambda **options: NodeTask(data="cora", **options),
    lambda **options: GraphClassTask(data="PROTEINS", **options),
]


def make_nets(**deq: Any) -> list[Any]:
    config = IGNNConfig(width=3, dropout=0.0, kappa=0.8)
    return [kind(4, 2, config, deq).double() for kind in (SkipIGNN, NodeIGNN, GraphIGNN)]


@pytest.mark.parametrize("norm", NORMS)
def test_conversion_there_and_back(norm: str) -> None:
    for model, again in zip(make_nets(norm_type=norm), make_nets(norm_type=norm), strict=True):
        released = to_authors(model.state_dict())
        assert {k for k in released if k.endswith("bias") and released[k].dim() == 2}
        released["X_0"] = torch.zeros(3, 5)
        again.load_state_dict(from_authors(again, released))
        assert_close(dict(again.state_dict()), dict(model.state_dict()), rtol=0, atol=0)


@pytest.mark.parametrize("norm", NORMS)
def test_sizes_are_those_of_the_weights(norm: str) -> None:
    for model in make_nets(norm_type=norm):
        for state in (model.state_dict(), to_authors(model.state_dict())):
            assert read_sizes(state, type(model).ends) == (4, 2)


def write_released(task: Any, path: Path) -> Mapping[str, Tensor]:
    """Write weights as the authors would, of a network of 5 features and 3 classes."""
    torch.manual_seed(0)
    weights = task.build(task.describe(5, ("a", "b", "c")).to_data()).state_dict()
    torch.save(task.to_authors(weights), path)
    return weights


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("make", TASKS)
def test_released_weights_are_converted_loaded_and_used_without_the_data(
    make: Any, norm: str, tmp_path: Path
) -> None:
    task = make(net=IGNNConfig(width=4), deq=DEQConfig({**TIGHT, "norm_type": norm}))
    with pytest.raises(DataError, match="name the folder"):
        task.open_data()
    weights = write_released(task, tmp_path / "released.pth")
    out = tmp_path / "ours.safetensors"
    convert_file(tmp_path / "released.pth", Preset(task, steps=1), "ignn-mine", out)
    model: Any = deq_zoo.load(out)
    assert_close(dict(model.state_dict()), dict(weights), rtol=0, atol=0)
    assert (model.facts["features"], model.facts["classes"]) == (5, ["0", "1", "2"])
    x = None if model.facts["identity"] else torch.rand(5, 5)
    prediction = model.predict({"edge_index": [[0, 1, 2], [1, 2, 3]], "x": x}).prediction
    assert prediction.probabilities.shape == (1 if prediction.unit == "graph" else 5, 3)


@pytest.mark.parametrize("name", ["ignn-ppi-large", "ignn-amazon-all", "ignn-cora-64"])
def test_the_command_converts_without_the_data(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "released.pth"
    command = ["convert", str(file), "--preset", name, "--set", "task.net.width=4"]
    assert main(command) == 2
    assert capsys.readouterr().err == f"deq-zoo: there is no file {file}\n"
    task: Any = find_preset(name).task
    write_released(replace(task, net=replace(task.net, width=4)), file)
    assert main(command) == 0
    assert deq_zoo.load(tmp_path / "released.safetensors").facts["features"] == 5


def test_names_of_classes_come_from_the_data_if_it_is_there(tmp_path: Path) -> None:
    task = GraphClassTask(data="rings", folds=4, net=IGNNConfig(width=4))
    state = task.to_authors(task.build().state_dict())
    weights, facts = task.from_authors(state)
    assert facts == task.facts()
    assert facts["classes"] == ["star", "ring"]
    load_weights(task.build(facts), weights, "the file")
    wider = replace(task.describe(3, ("a", "b", "c"))).to_data()  # weights of another set
    _, facts = task.from_authors(task.to_authors(task.build(wider).state_dict()))
    assert facts["classes"] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("norm", "parts"), [("weight_norm", {"g", "v"}), ("spectral_norm", {"orig", "g", "u", "v"})]
)
def test_tensors_that_only_the_authors_have_are_split_as_their_norm_does(
    norm: str, parts: set[str]
) -> None:
    model = make_nets(norm_type=norm)[2]
    released = to_authors(model.state_dict())
    for k in ("ig1", "ig2", "ig3"):
        names = {key for key in released if key.startswith(f"{k}.Omega_2")}
        assert names == {f"{k}.Omega_2_{part}" for part in parts}
        for name in names:
            assert released[name].shape == released[name.replace("Omega_2", "Omega_1")].shape
            assert not bool(released[name].any())


def test_conversion_replaces_a_meaningless_spectral_norm_and_only_that() -> None:
    model = make_nets(**CLIPPED)[1]
    released = to_authors(model.state_dict())
    released["ig1.W_u"] = -released["ig1.W_u"]
    with pytest.warns(UserWarning, match=r"1 spectral norms were zero or negative, ig1\.W_orig"):
        state = from_authors(model, released)
    sigma = state["ig1.W_u"] @ state["ig1.W_orig"] @ state["ig1.W_v"]
    exact = torch.linalg.matrix_norm(state["ig1.W_orig"], 2)
    assert 0.9 * exact < sigma <= exact * (1 + 1e-9)
    assert torch.equal(state["ig1.Omega_1_u"], released["ig1.Omega_1_u"])


def test_weights_that_do_not_fit_are_errors() -> None:
    skip, node, _ = make_nets()
    with pytest.raises(CheckpointError, match=r"it lacks V\.weight.*with the authors' width"):
        from_authors(node, to_authors(skip.state_dict()))
    released = to_authors(node.state_dict())
    released["V.weight"] = torch.zeros(7, 3)
    with pytest.raises(CheckpointError, match=r"V\.weight is \(7, 3\), the model's is \(2, 3\)"):
        from_authors(node, released)
    task = NodeTask(data="cora", net=IGNNConfig(width=4))
    with pytest.raises(CheckpointError, match=r"not the weights of this IGNN: .* ig1\.Omega_1"):
        task.from_authors(to_authors(skip.state_dict()))
    with pytest.raises(CheckpointError, match=r"V\.weight is \(2, 3\), the model's is \(2, 4\)"):
        task.from_authors(to_authors(make_nets(norm_type="none")[1].float().state_dict()))
