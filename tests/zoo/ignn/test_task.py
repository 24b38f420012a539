"""Tasks and presets: what is learnt, evaluated, drawn and saved."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import deq_zoo.ignn.presets  # noqa: F401
from deq_zoo.cli import main
from deq_zoo.errors import MissingPackage, ZooError
from deq_zoo.evaluate import evaluate
from deq_zoo.ignn import IGNNConfig
from deq_zoo.ignn.data import random_graphs
from deq_zoo.ignn.metrics import f1_scores, oracle_labels
from deq_zoo.ignn.set_task import GraphClassTask, TissueTask
from deq_zoo.ignn.task import NodeLabelTask, NodeTask
from deq_zoo.metrics import accuracy
from deq_zoo.preset import find_preset
from deq_zoo.settings import with_settings
from deq_zoo.task import Shard
from deq_zoo.values import from_data, to_data
from tests.golden import find_data
from tests.zoo.ignn.tasks import make_task, make_tissues, measure
from tests.zoo.training import train
from torchdeq import DEQConfig

F1 = {"micro_f1", "macro_f1"}


def test_the_smoke_preset_trains_and_reports(tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "run"
    assert main(["train", "ignn-smoke", "--cpu", "--out", str(out)]) == 0
    assert "accuracy" in capsys.readouterr().out
    assert "<h2>Examples</h2>" in (out / "report.html").read_text()
    assert {"states", "graphs"} <= {p.stem for p in (out / "pictures").glob("*.png")}
    assert main(["evaluate", str(out), "--cpu"]) == 0


@pytest.mark.parametrize("warm", [False, True])
def test_chains_are_learnt_to_their_ends(warm: bool) -> None:
    task = make_task(warm=warm)
    val, test = measure(task, train(task, 40, lr=0.02).model)
    assert val["accuracy"] > 95
    assert test["accuracy"] > 95


def test_after_every_step_the_parameters_are_in_their_ball() -> None:
    task = make_task()
    model = train(task, 3, lr=0.02).model
    radius = 0.9 / task.least_rho
    assert bool((model.ig1.W.abs().sum(1) <= radius * (1 + 1e-6)).all())
    normed = make_task(deq=DEQConfig(norm_type="weight_norm", f_max_iter=5, on_failure="ignore"))
    train(normed, 2, lr=0.02)


def test_shards_share_the_training_nodes() -> None:
    task = make_task(length=10)
    parts = [task.train_batch(0, 0, Shard(rank, 2)) for rank in range(2)]
    assert sorted(torch.cat(parts).tolist()) == sorted(task.nodes.train.tolist())
    with pytest.raises(ZooError, match="20 training nodes cannot be divided among 21 processes"):
        task.train_batch(0, 0, Shard(0, 21))


def test_every_process_has_graphs_even_of_a_short_batch() -> None:
    task = GraphClassTask(data="rings", batch=1, folds=4, net=IGNNConfig(width=4))
    with pytest.raises(ZooError, match="batch=1 cannot be divided among 2 processes: set task"):
        task.train_batch(0, 0, Shard(1, 2))
    task = GraphClassTask(data="rings", batch=19, folds=4, net=IGNNConfig(width=4))
    assert len(task.examples.train) == 20
    parts = [task.train_batch(1, 0, Shard(rank, 2)) for rank in range(2)]  # of one graph
    assert [task.batch_size(part) for part in parts] == [1, 0]  # the weights of their losses
    model = task.build()
    assert all(bool(task.loss(model, part, None).value.isfinite()) for part in parts)


def test_parts_of_a_batch_add_up_to_its_gradient_whatever_their_sizes() -> None:
    task = make_tissues(batch=3)
    torch.manual_seed(0)
    model = task.build()
    whole = task.train_batch(0, 0)
    parts = [task.train_batch(0, 0, Shard(rank, 2)) for rank in range(2)]
    counts = [task.batch_size(part) for part in parts]
    assert sum(counts) == task.batch_size(whole) == sum(len(part.x) for part in whole)
    losses = [task.loss(model, part, None).value.item() for part in parts]
    mean = sum(n * loss for n, loss in zip(counts, losses, strict=True)) / sum(counts)
    assert mean == pytest.approx(task.loss(model, whole, None).value.item(), rel=1e-5)


@pytest.mark.parametrize("name", ["ignn-quick", "ignn-smoke", "ignn-cora-64", "ignn-mutag-64"])
def test_splits_share_nothing(name: str) -> None:
    preset = find_preset(name)
    folder = {"ignn-cora-64": "planetoid_cora", "ignn-mutag-64": "tu"}.get(name)
    task = (preset.with_data_dir(find_data(folder)) if folder else preset).task
    splits = [
        set(torch.as_tensor(s).tolist()) for s in (task.train_set, task.val_set, task.test_set)
    ]
    assert all(splits)
    assert sum(map(len, splits)) == len(set.union(*splits))


def test_without_validation_nodes_the_last_checkpoint_counts() -> None:
    task, made = make_task(), make_task().nodes
    task.__dict__["nodes"] = replace(made, val=made.val[:0])
    assert task.val_set is None


def test_a_thorough_evaluation_alone_estimates_radii() -> None:
    for task in (make_task(), make_tissues()):
        torch.manual_seed(0)
        model = task.build()
        assert "spectral_radius" not in evaluate(task, model, "val", False).solver.summary()
        summary = evaluate(task, model, "val", True).solver.summary()
        assert 0 <= summary["spectral_radius"] < 1


def test_without_pyg_a_download_names_the_extra_that_has_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "torch_geometric", None)
    monkeypatch.setitem(sys.modules, "torch_geometric.datasets", None)
    task = NodeTask(data="cora", data_dir=str(tmp_path), download=True)
    message = r"downloads of graphs need torch_geometric: pip install -e '.*\[ignn\]'"
    with pytest.raises(MissingPackage, match=message):
        task.open_data()


def test_a_set_belongs_to_its_task() -> None:
    for name, wrong in (("ignn-amazon-all", "cora"), ("ignn-cora-64", "amazon")):
        with pytest.raises(ZooError, match=f"task.data is one of .*, got '{wrong}'"):
            with_settings(find_preset(name), [f"task.data={wrong}"])


def test_a_download_that_cannot_be_is_refused(tmp_path: Path) -> None:
    folder = str(tmp_path)
    with pytest.raises(ZooError, match="amazon cannot be downloaded, since PyG does not have"):
        NodeLabelTask(data_dir=folder, download=True).build()
    with pytest.raises(ZooError, match="rings cannot be downloaded, since it is made by rule"):
        GraphClassTask(data="rings", download=True).build()
    for task in (NodeTask(data="cora", download=True), TissueTask(download=True)):
        with pytest.raises(ZooError, match="download=true needs a folder"):
            task.build()


def test_nodes_without_a_test_split_give_no_picture_and_no_number() -> None:
    task = make_task(data="cora")
    made = make_task().nodes
    task.__dict__["nodes"] = replace(made, test=made.test[:0])  # in place of files
    model = task.build().eval()
    assert math.isnan(measure(task, model)[1]["accuracy"])
    assert task.pictures(model) == []


def test_labels_of_nodes_of_one_graph(tmp_path: Path) -> None:
    n = 12
    ring = "\n".join(f"{k} {(k + 1) % n}" for k in range(n))
    files = {
        "adj_list.txt": ring, "meta.txt": f"{n} 2",
        "label.txt": "\n".join("1 0" if k < 6 else "1 1" for k in range(n)),
        "train_idx-0.06.txt": "\n".join(map(str, range(11))), "test_idx.txt": "11\n",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    task = NodeLabelTask(data_dir=str(tmp_path), net=IGNNConfig(width=4, dropout=0.0))
    model = train(task, 30, lr=0.02).model
    assert [set(metrics) for metrics in measure(task, model)] == [F1, F1]
    (picture,) = task.pictures(model)
    assert picture.name == "labels"
    assert "on all 1 test nodes; of each node as many labels as it has" in picture.caption


def test_tissues_are_batched_evaluated_and_drawn() -> None:
    task = make_tissues()
    made = task.examples
    (part,) = task.train_batch(0, 0, Shard())
    assert len(part.x) == part.graph.nodes == len(part.y)
    model = train(task, 8, lr=0.05).model
    assert [set(metrics) for metrics in measure(task, model)] == [F1, F1]
    (picture,) = task.pictures(model)
    assert f"all {made.sizes[5]} nodes of the 1 test graphs" in picture.caption


def test_rings_and_stars_are_distinguished() -> None:
    task = GraphClassTask(
        data="rings", batch=20, folds=4, net=IGNNConfig(width=8, dropout=0.0),
        deq=DEQConfig(norm_type="none", ift=True, f_stop_mode="rel"),
    )  # fmt: skip
    assert measure(task, train(task, 25, lr=0.02).model)[0]["accuracy"] > 80


def test_parts_of_similar_sizes_give_the_loss_of_the_whole_batch() -> None:
    task = GraphClassTask(data="rings", folds=4, net=IGNNConfig(width=4, dropout=0.0))
    made = random_graphs(6)
    sizes = (4, 9, 2, 5, 3, 8)  # parts by doubling: 2 3 4, 5 8 9
    edges = torch.tensor([[0, 4, 13, 15, 20, 23], [1, 5, 14, 16, 21, 24]])
    made = type(made)(edges, sizes, torch.randn(31, 2), torch.arange(6) % 2)
    task.__dict__["examples"] = made.split(3, 0, 0)
    parts = task.collate(range(6))
    assert [part.graph.sizes for part in parts] == [(2, 3, 4), (5, 8, 9)]
    model = task.build()
    torch.testing.assert_close(
        task.loss(model, parts, None).value, task.loss(model, [task.join(range(6))], None).value
    )


def test_a_config_from_a_file_builds_the_same_network() -> None:
    task = make_task(deq=DEQConfig(f_max_iter=5))  # which says nothing about a norm
    again = from_data(to_data(task))
    assert task.build().state_dict().keys() == again.build().state_dict().keys()


def test_metrics_by_their_definitions() -> None:
    logits = torch.tensor([[3.0, 1, 2], [0, 5, 1], [1, 2, 3], [2, 1, 0]])
    y = torch.tensor([[1, 0, 1], [0, 1, 0], [0, 0, 0], [1, 1, 1]])
    marked = oracle_labels(logits, y)
    assert marked.int().tolist() == y.tolist()  # no label where there is none
    assert accuracy(logits, torch.tensor([0, 1, 0, 0])) == pytest.approx(75.0)
    guess = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 0, 0], [0, 1, 0]])
    scores = f1_scores(guess, y)
    assert scores["micro_f1"] == pytest.approx(100 * 2 * 3 / (2 * 3 + 1 + 3))
    per_class = [2 * 1 / (2 * 1 + 1 + 1), 1.0, 0.0]  # the last one is never guessed
    assert scores["macro_f1"] == pytest.approx(100 * sum(per_class) / 3)
    empty = f1_scores(torch.zeros(2, 2), torch.zeros(2, 2))
    assert empty == {"micro_f1": 0.0, "macro_f1": 0.0}
    assert accuracy(torch.ones(3, 1), torch.zeros(3, dtype=torch.int64)) == 100  # one class
    assert math.isnan(accuracy(logits[:0], y[:0, 0]))
    assert all(map(math.isnan, f1_scores(marked[:0], y[:0]).values()))
