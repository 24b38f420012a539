"""Readers of the public formats, splits, chains, and errors that say what to put where."""

from __future__ import annotations

import json
import os
import pickle
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deq_zoo.errors import DataError, ZooError
from deq_zoo.ignn.data import GraphSet, chains, random_graphs, split_by_class
from deq_zoo.ignn.readers import amazon, amazon_photo, planetoid, ppi, tu
from tests.golden import find_data

EDGES = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])


def write_texts(folder: Path, **texts: str) -> None:
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text)


def test_chains_of_any_length() -> None:
    made = chains(length=5, chains=3)
    assert made.x is not None
    assert (len(made.y), made.features, made.names) == (30, 100, ("0", "1"))
    assert made.x.sum(1).tolist() == [1.0, 0, 0, 0, 0] * 6
    assert made.edges.shape == (2, 24)
    assert bool((made.edges[1] - made.edges[0] == 1).all())
    assert bool((made.edges[0] // 5 == made.edges[1] // 5).all())
    parts = torch.cat((made.train, made.val, made.test))
    assert len(parts.unique()) == len(parts)
    with pytest.raises(ValueError, match="a feature for each class"):
        chains(features=1)


def test_folds_are_stratified_disjoint_and_complete() -> None:
    graphs = GraphSet(EDGES, (3,) * 40, torch.ones(120, 1), (torch.arange(40) < 30).long())
    tests = []
    for fold in range(4):
        split = graphs.split(4, fold, seed=1)
        assert sorted(split.train + split.val + split.test) == list(range(40))
        assert len(split.test) == len(split.val) == 10
        assert 7 <= int(graphs.y[list(split.test)].sum()) <= 8
        tests.append(split.test)
    assert sorted(sum(tests, ())) == list(range(40))
    assert graphs.split(4, 0, 1).test == tests[0]
    assert graphs.split(4, 0, 2).test != tests[0]
    with pytest.raises(ValueError, match="one of them, got 4 of 4"):
        graphs.split(4, 4, 0)
    with pytest.raises(ValueError, match=r"40 graphs leave fold 50 of 60.*use fewer folds"):
        graphs.split(60, 50, 0)


def test_splits_by_class() -> None:
    y = torch.arange(90) % 3
    train, val, test = split_by_class(y, 4, 5, seed=0)
    assert y[train].bincount().tolist() == [4, 4, 4]
    assert y[val].bincount().tolist() == [5, 5, 5]
    assert sorted(torch.cat((train, val, test)).tolist()) == list(range(90))


def test_graphs_of_a_set_are_its_blocks() -> None:
    made = random_graphs(5)
    apart = made.graphs(normalise=False)
    assert tuple(g.nodes for g in apart) == made.sizes
    whole = torch.zeros(sum(made.sizes), sum(made.sizes))
    whole[tuple(made.edges)] = 1.0
    joined = torch.block_diag(*(g.outgoing.to_dense().clamp_max(1) for g in apart))
    assert torch.equal(joined, whole)
    for graph in made.graphs(normalise=True):
        assert float(graph.rho) == pytest.approx(1 + 1e-5)


@pytest.mark.parametrize("suffix", ["texts", "archive"])
def test_tu_sets(tmp_path: Path, suffix: str) -> None:
    if suffix == "texts":
        write_texts(
            tmp_path,
            X_A="1, 2\n2, 1\n3, 4\n4, 3\n4, 5\n5, 4\n",
            X_graph_indicator="1\n1\n2\n2\n2\n",
            X_graph_labels="-1\n1\n",
            X_node_labels="7\n3\n3\n3\n9\n",
        )
    else:
        np.savez(
            tmp_path / "X.npz",
            node_ptr=[0, 2, 5],
            edge_index=[[0, 1, 2, 3, 3, 4], [1, 0, 3, 2, 4, 3]],
            node_label=[1, 0, 0, 0, 2],
            graph_label=[0, 1],
        )
    result = tu(tmp_path, "X")
    assert result.sizes == (2, 3)
    assert result.y.tolist() == [0, 1]
    assert result.names == (("-1", "1") if suffix == "texts" else ("0", "1"))
    assert result.x.argmax(1).tolist() == [1, 0, 0, 0, 2]
    assert result.edges.tolist() == [[0, 1, 2, 3, 3, 4], [1, 0, 3, 2, 4, 3]]


def test_planetoid_files_of_python_2_and_their_gaps(tmp_path: Path) -> None:
    sparse = pytest.importorskip("scipy.sparse")
    allx = sparse.csr_matrix(np.array([[1.0, 1, 0], [0, 2, 0], [0, 0, 4]], dtype=np.float32))
    tx = sparse.csr_matrix(np.array([[3.0, 0, 1], [0, 0, 1]], dtype=np.float32))
    parts: dict[str, Any] = {
        "x": allx[:1], "allx": allx, "tx": tx, "y": np.eye(2, dtype=np.int32)[:1],
        "ally": np.eye(2, dtype=np.int32)[[0, 1, 0]], "ty": np.eye(2, dtype=np.int32)[[1, 1]],
        "graph": defaultdict(list, {0: [1, 1, 0], 1: [0], 2: [5], 5: [2]}),
    }  # fmt: skip
    for part, value in parts.items():
        (tmp_path / f"ind.cora.{part}").write_bytes(pickle.dumps(value, protocol=2))
    (tmp_path / "ind.cora.test.index").write_text("5\n3\n")  # node 4 has no row
    result = planetoid(tmp_path, "cora")
    assert result.x is not None
    assert result.x.tolist() == [
        [0.5, 0.5, 0], [0, 1, 0], [0, 0, 1], [0, 0, 1], [0, 0, 0], [0.75, 0, 0.25]
    ]  # fmt: skip
    assert result.y.tolist() == [0, 1, 0, 1, 0, 1]
    assert result.edges.tolist() == [[0, 1, 2, 5], [1, 0, 5, 2]]
    assert result.train.tolist() == [0]
    assert result.test.tolist() == [3, 5]


def test_a_pickle_with_anything_but_arrays_is_refused(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return os.system, ("true",)

    (tmp_path / "ind.cora.allx").write_bytes(pickle.dumps(Bomb(), protocol=2))
    (tmp_path / "ind.cora.tx").write_bytes(pickle.dumps(Bomb(), protocol=2))
    with pytest.raises(DataError, match=r"posix\.system, which is no array"):
        planetoid(tmp_path, "cora")


def test_co_purchase_archives(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "amazon_electronics_photo.npz",
        adj_indptr=[0, 1, 2, 2], adj_indices=[1, 0], adj_data=[1.0, 1], adj_shape=[3, 3],
        attr_indptr=[0, 1, 1, 2], attr_indices=[0, 1], attr_data=[2.0, 1], attr_shape=[3, 2],
        labels=[0, 1, 1],
    )  # fmt: skip
    result = amazon_photo(tmp_path)
    assert result.x is not None
    assert result.x.tolist() == [[1, 0], [0, 0], [0, 1]]
    assert result.edges.tolist() == [[0, 1], [1, 0]]


def test_amazon_texts(tmp_path: Path) -> None:
    texts = {"adj_list": "0 1 2\n1 0\n2 0\n", "label": "1 0\n0 1\n1 1\n", "meta": "3 2\n",
             "train_idx-0.06": "0\n1\n", "test_idx": "2\n"}  # fmt: skip
    write_texts(tmp_path, **texts)
    result = amazon(tmp_path)
    assert result.x is None
    assert (result.features, len(result.names)) == (3, 2)
    assert result.edges.tolist() == [[0, 0, 1, 2], [1, 2, 0, 0]]
    assert result.test.tolist() == [2]
    assert [len(part) for part in (result.train, result.val)] == [1, 1]
    write_texts(tmp_path, meta="4 2\n")
    with pytest.raises(DataError, match="says 4 x 2"):
        amazon(tmp_path)


def test_ppi_as_pyg_has_it(tmp_path: Path) -> None:
    for split, graphs in (("train", [1, 1, 1, 2, 2]), ("valid", [3, 3]), ("test", [4])):
        n = len(graphs)
        links = [{"source": k, "target": k + 1} for k in range(n - 1) if graphs[k] == graphs[k + 1]]
        links += [{"source": 0, "target": 0}]
        graph = {"directed": False, "nodes": [{"id": k} for k in range(n)], "links": links}
        (tmp_path / f"{split}_graph.json").write_text(json.dumps(graph))
        np.save(tmp_path / f"{split}_feats.npy", np.ones((n, 4)))
        np.save(tmp_path / f"{split}_labels.npy", np.ones((n, 3), dtype=np.int64))
        np.save(tmp_path / f"{split}_graph_id.npy", np.array(graphs))
    result = ppi(tmp_path)
    assert result.sizes == (3, 2, 2, 1)
    assert (result.train, result.val, result.test) == ((0, 1), (2,), (3,))
    assert result.edges.tolist() == [[0, 1, 1, 2, 3, 4, 5, 6], [1, 0, 2, 1, 4, 3, 6, 5]]


def test_missing_files_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"name the folder with cora\.npz.*--data-dir"):
        planetoid(None, "cora")
    with pytest.raises(DataError, match="there is no folder"):
        tu(tmp_path / "nowhere", "X")
    with pytest.raises(DataError, match=r"put there train_graph\.json, train_feats\.npy"):
        ppi(tmp_path)
    (tmp_path / "X_A.txt").write_text("1, 2\n")
    with pytest.raises(DataError, match=r"X_graph_indicator\.txt is missing"):
        tu(tmp_path, "X")
    (tmp_path / "Y.npz").write_bytes(b"nonsense")
    with pytest.raises(DataError, match="cannot read"):
        tu(tmp_path, "Y")


def test_mutag_needs_its_package_or_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deq_zoo.ignn.readers.find_spec", lambda name: None)
    with pytest.raises(ZooError, match=r"package grakel: pip install -e '.*\[graphs\]'"):
        tu(None, "MUTAG")


def test_real_sets_have_their_published_sizes() -> None:
    cora = planetoid(find_data("planetoid_cora"), "cora")
    assert (len(cora.y), cora.features, len(cora.names)) == (2708, 1433, 7)
    assert cora.edges.shape[1] == 10_556
    assert [len(p) for p in (cora.train, cora.val, cora.test)] == [140, 500, 1000]
    mutag = tu(find_data("tu"), "MUTAG")
    assert (len(mutag.sizes), mutag.features, len(mutag.names)) == (188, 7, 2)
    tissues = ppi(find_data("ppi_ohmnet"))
    assert (len(tissues.sizes), tissues.features, len(tissues.names)) == (22, 50, 121)
    assert [len(p) for p in (tissues.train, tissues.val, tissues.test)] == [18, 2, 2]
    assert tissues.edges.shape[1] == 2 * (735_385 - 22_741)  # both ways, without loops
