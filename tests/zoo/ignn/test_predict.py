"""Predictions: graphs as users have them, in the form of the training graphs."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from deq_zoo.cli import main
from deq_zoo.errors import DataError, ZooError
from deq_zoo.ignn import IGNN, Classes, IGNNConfig, LabelSets, NodeIGNN
from deq_zoo.ignn.base import IGNNTask
from deq_zoo.ignn.data import NodeSet, chains, random_graphs
from deq_zoo.ignn.facts import GraphFacts
from deq_zoo.ignn.set_task import GraphClassTask, TissueTask
from deq_zoo.ignn.task import NodeLabelTask, NodeTask
from deq_zoo.predictions import Failure, OutFolder, Prediction
from tests.zoo.ignn.inputs import predict_inputs, python_input
from torchdeq import DEQConfig

EXACT = DEQConfig(norm_type="none", f_tol=1e-6, f_stop_mode="rel", f_max_iter=300)


def make_model(task: IGNNTask) -> IGNN:
    """Build a model that knows the form of its graphs, as one from a checkpoint does."""
    torch.manual_seed(0)
    model = task.build().eval()
    model.facts = task.facts()
    return model


def make_rings() -> GraphClassTask:
    return GraphClassTask(data="rings", folds=4, net=IGNNConfig(width=8), deq=EXACT)


def make_tissues() -> TissueTask:
    task = TissueTask(net=IGNNConfig(width=2), deq=EXACT)
    graphs = random_graphs(6)
    y = torch.nn.functional.one_hot(torch.arange(len(graphs.x)) % 2).float()
    split = {"train": (0, 1, 2, 3), "val": (4,), "test": (5,), "class_names": ()}
    task.__dict__["examples"] = replace(graphs, y=y, **split)  # type: ignore[arg-type]
    return task


@torch.no_grad()
def test_the_training_graph_is_predicted_as_it_is_evaluated() -> None:
    task = NodeTask(length=8, net=IGNNConfig(width=8), deq=EXACT)
    model, nodes = make_model(task), task.nodes
    answer = model.predict((nodes.edges, nodes.x))
    logits = model(*task.on(model.device)[:2]).prediction
    assert isinstance(answer.prediction, Classes)
    assert_close(answer.prediction.probabilities, logits.softmax(1))
    assert answer.prediction.labels == [str(k) for k in logits.argmax(1).tolist()]
    again = model.predict((nodes.edges, nodes.x), z0=answer.state)
    assert again.stats is not None
    assert answer.stats is not None
    assert again.stats.nfe < answer.stats.nfe


@pytest.mark.parametrize("make", [make_rings, make_tissues])
@torch.no_grad()
def test_several_graphs_are_predicted_as_they_are_evaluated(make: Any) -> None:
    task = make()
    model, data = make_model(task), task.examples
    one_way = data.edges[:, data.edges[0] < data.edges[1]]  # both ways are restored
    batch = torch.repeat_interleave(torch.tensor(data.sizes))
    source = {"edge_index": one_way, "x": data.x, "batch": batch, "y": data.y}
    prediction = model.predict(source).prediction
    logits = model(*task.join(range(len(data.sizes)))[:2]).prediction
    if isinstance(prediction, LabelSets):
        assert_close(prediction.probabilities, logits.sigmoid(), rtol=1e-4, atol=1e-5)
        assert [len(row) for row in prediction.labels] == (logits > 0).sum(1).tolist()
    else:
        assert_close(prediction.probabilities, logits.softmax(1), rtol=1e-4, atol=1e-5)
        assert prediction.unit == "graph"
        assert set(prediction.labels) <= {"ring", "star"}


def test_every_kind_of_graph_gives_the_same_answer(tmp_path: Path) -> None:
    model, fields = make_model(make_rings()), python_input()
    np.savez(tmp_path / "ring.npz", **fields)
    tensors = {name: torch.as_tensor(value) for name, value in fields.items()}
    pairs = fields["edge_index"].tolist(), fields["x"].astype(np.uint8)
    kinds: list[Any] = [
        fields, str(tmp_path / "ring.npz"), tmp_path / "ring.npz", pairs,
        SimpleNamespace(**tensors), {**fields, "ptr": [0, 6]},
        {**fields, "edge_index": fields["edge_index"].astype(">u4")},
    ]  # fmt: skip
    expected = model.predict(fields).prediction.probabilities
    assert expected.shape == (1, 2)
    for kind in kinds:
        assert torch.equal(model.predict(kind).prediction.probabilities, expected)
    pyg = pytest.importorskip("torch_geometric.data")
    data = pyg.Data(tensors["x"], tensors["edge_index"])
    assert torch.equal(model.predict(data).prediction.probabilities, expected)
    both = model.predict(pyg.Batch.from_data_list([data, data])).prediction
    assert_close(both.probabilities, expected.expand(2, 2))


def test_features_and_edges_take_the_form_of_training() -> None:
    task = NodeTask(data="cora", net=IGNNConfig(width=4), deq=EXACT)
    none = torch.arange(0)
    x = torch.tensor([[0.5, 0.5], [1, 0], [0, 0]])
    edges = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
    task.__dict__["nodes"] = NodeSet(edges, x, torch.tensor([0, 1, 1]), none, none, none)
    model = make_model(task)
    expected = model(*task.on(model.device)[:2]).prediction.softmax(1)
    counts = torch.tensor([[3, 3], [7, 0], [0, 0]])  # of words, as in the published files
    loops = torch.tensor([[0, 1, 1, 2], [1, 2, 1, 1]])  # with a loop, and one way only
    assert_close(model.predict((loops, counts)).prediction.probabilities, expected)
    weighted = {"edge_index": edges, "edge_weight": torch.ones(4), "x": counts}
    assert_close(model.predict(weighted).prediction.probabilities, expected)


def test_nodes_that_are_their_own_features_need_none(tmp_path: Path) -> None:
    task = NodeLabelTask(net=IGNNConfig(width=4), deq=EXACT)
    facts = task.describe(3, ("a", "b")).to_data()
    model = task.build(facts).eval()
    model.facts = facts
    prediction = model.predict({"edge_index": [[0, 1], [1, 2]]}).prediction
    assert isinstance(prediction, LabelSets)
    assert prediction.probabilities.shape == (3, 2)
    with pytest.raises(ValueError, match="nodes 0 to 2, got 0 to 3"):
        model.predict({"edge_index": [[0], [3]]})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"edge_index": None}, "a graph is an .npz file, .* with edge_index: got a dict of"),
        ({"edge_index": [[0.5], [1]]}, r"edge_index must be \(2, E\) integers"),
        ({"edge_index": [[True], [True]]}, r"edge_index must be \(2, E\) integers"),
        ({"edge_index": [[0], [6]]}, "edges join nodes 0 to 5, got 0 to 6"),
        ({"edge_index": [[-1], [0]]}, "edges join nodes 0 to 5, got -1 to 0"),
        ({"edge_index": [["a"], ["b"]]}, "edge_index must hold numbers"),
        ({"x": None}, r"a graph needs x: 3 features for each node"),
        ({"x": np.ones((6, 4))}, r"x must be \(nodes, 3\).*got \(6, 4\)"),
        ({"x": np.ones(6)}, r"x must be \(nodes, 3\).*got \(6,\)"),
        ({"x": np.ones((0, 3))}, r"x must be \(nodes, 3\).*got \(0, 3\)"),
        ({"x": np.full((6, 3), np.inf)}, "x must be finite"),
        ({"x": np.ones((6, 3), complex)}, "x must hold numbers, got complex"),
        ({"edge_weight": [1.0]}, "one floating-point number for each of 6 edges"),
        ({"edge_weight": np.full(6, np.nan)}, "weights of edges must be finite"),
        ({"edge_weight": -np.ones(6)}, "add up to 0: edges can be normalised only where"),
        ({"batch": [0, 0, 0, 1, 1, 1]}, "an edge joins two of the graphs"),
        ({"batch": [1, 0, 0, 0, 0, 0]}, "counted from 0, in rising order"),
        ({"batch": [-1, 0, 0, 0, 0, 0]}, "counted from 0, in rising order"),
        ({"batch": [0.0] * 6}, "counted from 0, in rising order"),
        ({"ptr": [0, 5]}, "ptr must hold integers that rise from 0 to 6"),
        ({"ptr": [0.0, 6.0]}, "ptr must hold integers that rise from 0 to 6"),
    ],
)
def test_graphs_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        make_model(make_rings()).predict({**python_input(), **changes})


def test_other_inputs_are_refused() -> None:
    model = make_model(make_rings())
    for wrong, message in ((3, "got int"), ((1, 2, 3), "got tuple of 3"), (None, "got NoneType")):
        with pytest.raises(TypeError, match=message):
            model.predict(wrong)
    with pytest.raises(ValueError, match=r"z0 must be \(6, 8\).*got \(5, 8\)"):
        model.predict(python_input(), z0=[torch.zeros(5, 8)] * 3)
    with pytest.raises(ZooError, match="does not know the form of its graphs"):
        NodeIGNN(3, 2, IGNNConfig()).predict(python_input())


def test_negative_weights_are_as_well_posed_as_others() -> None:
    model = make_model(make_rings())
    weights = [1.0, -0.4, 1.0, -0.4, 1.0, -0.4]
    answer = model.predict({**python_input(), "edge_weight": weights})
    assert all(bool(stats.converged.all()) for stats in answer.layer_stats)


def test_a_broken_file_spoils_no_other_and_nothing_is_written_unasked(tmp_path: Path) -> None:
    good, broken = predict_inputs(tmp_path)
    task, before = make_rings(), sorted(tmp_path.iterdir())
    out = OutFolder(tmp_path / "out", asked=False)
    results = list(task.predict(make_model(task), [*broken, *good], out))
    assert [type(result) for result in results] == [Failure, Failure, Failure, Prediction]
    for result, path in zip(results, broken, strict=False):
        assert isinstance(result, Failure)
        assert str(path) in result.reason
        assert "pickle" not in result.reason
    assert sorted(tmp_path.iterdir()) == before
    (answer,) = (result for result in results if isinstance(result, Prediction))
    assert answer.data["unit"] == "graph"
    assert answer.data["labels"][0] in answer.text
    with pytest.raises(DataError, match=r"wide\.npz: x must be \(nodes, 3\)"):
        make_model(task).predict(broken[1])


def test_a_named_folder_gets_a_table_for_each_file(tmp_path: Path) -> None:
    task, made = NodeTask(length=8, deq=EXACT), chains(8)
    assert made.x is not None
    np.savez(tmp_path / "chain.npz", edge_index=made.edges.numpy(), x=made.x.numpy())
    model, out = make_model(task), OutFolder(tmp_path / "out")
    (result,) = task.predict(model, [tmp_path / "chain.npz"], out)
    assert isinstance(result, Prediction)
    assert "320 nodes: " in result.text
    assert result.files == (tmp_path / "out" / "chain-classes.csv",)
    table = list(csv.DictReader(result.files[0].read_text().splitlines()))
    assert [row["class"] for row in table] == result.data["labels"]
    chances = [float(row["probability of 0"]) + float(row["probability of 1"]) for row in table]
    assert chances == pytest.approx([1.0] * 320, abs=1e-5)
    for paths in ([tmp_path / "chain.npz"], [Path("a/x.npz"), Path("b/x.npz")]):
        with pytest.raises(ZooError, match=r"exists already|two results would be written"):
            task.predict(model, paths, out)


def test_a_solve_that_does_not_settle_is_mentioned(tmp_path: Path) -> None:
    good, _ = predict_inputs(tmp_path)
    out = OutFolder(tmp_path / "out", asked=False)
    for options, warned in (
        ({"f_max_iter": 2}, True),
        ({"f_max_iter": 2, "f_tol": 0.0}, True),
        ({"f_max_iter": 200, "f_tol": 0.0}, False),  # the whole budget is spent, as asked for
        ({}, False),
    ):
        task = replace(make_rings(), deq=EXACT.with_options(on_failure="ignore", **options))
        (result,) = task.predict(make_model(task), good, out)
        assert isinstance(result, Prediction)
        assert ("did not settle" in result.text) == warned, options


def test_many_classes_and_many_labels_fit_on_a_line() -> None:
    names = tuple("abcdef")
    nodes = Classes("node", names, torch.eye(6)[[0, 0, 0, 1, 1, 2, 3, 4]])
    assert nodes.summary() == (
        "8 nodes: 3 of class a, 2 of class b, 1 of class c, 2 of other classes; mean probability "
        "100.0 %"
    )
    labels = LabelSets("node", names, torch.eye(6)[[0, 0, 1]] + torch.eye(6)[[2, 1, 1]])
    assert labels.summary() == "3 nodes with 1.7 labels on average; most often a (2), b (2), c (1)"
    assert labels.labels == [("a", "c"), ("a", "b"), ("b",)]
    assert "\n1,a;b,1," in labels.to_csv()
    assert LabelSets("node", names, torch.zeros(1, 6)).summary() == (
        "1 node with 0.0 labels on average"
    )


def test_facts_go_to_a_checkpoint_and_back() -> None:
    facts = GraphFacts(features=3, classes=("a", "b"), rho=1.0, unit_rows=True)
    assert GraphFacts.from_data(facts.to_data()) == facts
    assert GraphFacts.from_data({**facts.to_data(), "of a later version": 1}) == facts


@pytest.mark.slow
def test_the_command_predicts_and_goes_on_after_a_broken_file(tmp_path: Path, capsys: Any) -> None:
    good, broken = predict_inputs(tmp_path)
    run = tmp_path / "run"
    options = ["--cpu", "--quiet", "--no-report", "--set", "epochs=1"]
    assert main(["train", "ignn-smoke", "--out", str(run), *options]) == 0
    capsys.readouterr()
    main(["predict", str(run), *map(str, [*broken, *good]), "--cpu"])
    assert "ring.npz: " in capsys.readouterr().out
