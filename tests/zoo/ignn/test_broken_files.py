"""Files that are damaged, or do not fit together: one paragraph that names the file, no more."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deq_zoo.errors import DataError
from deq_zoo.ignn.readers import amazon, amazon_photo, planetoid, ppi, tu

ROWS = {"indptr": [0, 1, 2, 2], "indices": [0, 1], "shape": [3, 2]}


def write_archive(path: Path, source: dict[str, Any], **changes: Any) -> None:
    """Write an archive with some arrays changed; None leaves one out."""
    kept = {name: value for name, value in (source | changes).items() if value is not None}
    arrays: dict[str, Any] = {name: np.array(value) for name, value in kept.items()}
    np.savez_compressed(path, **arrays)


NODES: dict[str, Any] = {
    "edge_index": [[0, 1], [1, 2]], "y": [0, 1, 1], "train_idx": [0], "val_idx": [1],
    "test_idx": [2], **{f"x_{name}": value for name, value in ROWS.items()},
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y": None}, "lacks y; it has"),
        ({"x_indptr": None, "x_shape": None}, "lacks x_indptr, x_shape"),
        ({"val_idx": None}, "lacks val_idx"),
        ({"edge_index": None}, "must hold edge_index, x_"),
        ({"edge_index": [[0, 1], [1, 3]]}, "must join nodes 0 to 2, got 0 to 3"),
        ({"edge_index": [0, 1]}, r"edges must be \(2, E\)"),
        ({"y": [0, 1]}, "there are 2 nodes, but 3 rows"),
        ({"y": [0, 1, -1]}, "classes count from 0, got -1"),
        ({"y": [[0], [1], [1]]}, "one class for each node"),
        ({"test_idx": [3]}, "must name nodes 0 to 2, got 0 to 3"),
        ({"train_idx": np.zeros(0, np.int64)}, "leaves no nodes to train on"),
        ({"test_idx": [1]}, "share no node, but node 1 is named 2 times"),
        ({"x_shape": [3]}, "is not as expected"),
        ({"x_indices": [0, 2]}, "is not as expected"),
        ({"x_indices": [0, -1]}, "negative column"),
    ],
)
def test_archives_of_nodes(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = tmp_path / "cora.npz"
    write_archive(path, NODES)
    assert planetoid(tmp_path, "cora").edges.tolist() == [[0, 1, 1, 2], [1, 0, 2, 1]]
    write_archive(path, NODES, **changes)
    with pytest.raises(DataError, match=rf"cora\.npz.*{message}"):
        planetoid(tmp_path, "cora")


def test_archives_of_co_purchases_name_what_they_lack(tmp_path: Path) -> None:
    np.savez(tmp_path / "amazon_photo.npz", adj_indptr=[0, 1])
    with pytest.raises(DataError, match="lacks adj_indices, labels, attr_indices"):
        amazon_photo(tmp_path)


def test_damaged_archives(tmp_path: Path) -> None:
    path = tmp_path / "X.npz"
    write_archive(path, {"node_ptr": np.arange(4000), "junk": np.random.rand(100)})
    whole = bytearray(path.read_bytes())
    whole[60:2000] = bytes(1940)
    for content in (b"", bytes(whole), bytes(whole[:500])):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"cannot read .*X\.npz"):
            tu(tmp_path, "X")
    with path.open("wb") as file:
        np.save(file, np.ones(3))
    with pytest.raises(DataError, match=r"X\.npz is one array, and should be an archive"):
        tu(tmp_path, "X")


MOLECULES: dict[str, Any] = {
    "node_ptr": [0, 2, 5], "edge_index": [[0, 1, 2], [1, 0, 3]], "node_label": [1, 0, 0, 0, 2],
    "graph_label": [0, 1],
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"node_label": [1, 0, 0, 0]}, "5 nodes, but 4 rows"),
        ({"graph_label": [0]}, "2 graphs have 1 labels"),
        ({"edge_index": [[0], [2]]}, "an edge joins two of the graphs"),
        ({"edge_index": [[0], [5]]}, "must join nodes 0 to 4"),
        ({"node_ptr": [0, 6, 5]}, "graphs of so many nodes"),
    ],
)
def test_archives_of_graphs(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write_archive(tmp_path / "X.npz", MOLECULES, **changes)
    with pytest.raises(DataError, match=rf"X\.npz.*{message}"):
        tu(tmp_path, "X")


TU = {"A": "1, 2\n2, 1\n3, 4\n", "graph_indicator": "1\n1\n2\n2\n", "graph_labels": "1\n2\n",
      "node_labels": "0\n1\n0\n1\n"}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"graph_indicator": "0\n0\n1\n1\n"}, "X_graph_indicator.*with graphs from 1 to 2"),
        ({"graph_indicator": "1\n2\n3\n3\n"}, "X_graph_indicator.*with graphs from 1 to 2"),
        ({"node_labels": "0\n1\n"}, "X_node_labels.*4 nodes, but 2 rows"),
        ({"node_labels": "0\n1\n" * 4}, "X_node_labels.*4 nodes, but 8 rows"),
        ({"A": "1, 2, 3\n"}, "X_A.*two nodes on each line, got 3"),
        ({"A": "0, 1\n"}, "X_A.*must join nodes 0 to 3, got -1 to 0"),
        ({"A": "one, two\n"}, "X_A.*must hold numbers"),
    ],
)
def test_texts_of_graphs(tmp_path: Path, changes: dict[str, str], message: str) -> None:
    for part, text in (TU | changes).items():
        (tmp_path / f"X_{part}.txt").write_text(text)
    with pytest.raises(DataError, match=message):
        tu(tmp_path, "X")


@pytest.mark.parametrize(("text", "edges"), [("", 0), ("3, 4\n", 2)])
def test_graphs_may_have_few_edges(tmp_path: Path, text: str, edges: int) -> None:
    for part, content in (TU | {"A": text}).items():
        (tmp_path / f"X_{part}.txt").write_text(content)
    assert tu(tmp_path, "X").edges.shape == (2, edges)


AMAZON = {"adj_list": "0 1\n1 0\n2\n", "label": "1 0\n0 1\n1 1\n", "meta": "3 2\n",
          "train_idx-0.06": "0\n1\n", "test_idx": "2\n"}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"meta": "three 2\n"}, "meta.txt is not as expected"),
        ({"meta": "3\n"}, "meta.txt is not as expected"),
        ({"adj_list": "0 one\n1\n2\n"}, "adj_list.txt is not as expected"),
        ({"adj_list": "0 3\n1\n2\n"}, "adj_list.txt.*0 to 2, got 0 to 3"),
        ({"adj_list": "0 1\n1 0\n"}, "adj_list.txt.*3 nodes, but 2 rows"),
        ({"train_idx-0.06": "0\n7\n"}, "must name nodes 0 to 2"),
        ({"test_idx": "-1\n"}, "must name nodes 0 to 2"),
        ({"train_idx-0.06": "0\n"}, "train_idx-0.06.txt leaves no nodes to train on"),
        ({"test_idx": "0\n"}, "share no node, but node 0 is named 2 times"),
    ],
)
def test_texts_of_amazon(tmp_path: Path, changes: dict[str, str], message: str) -> None:
    for name, text in (AMAZON | changes).items():
        (tmp_path / f"{name}.txt").write_text(text)
    with pytest.raises(DataError, match=message):
        amazon(tmp_path)


def test_amazon_without_edges(tmp_path: Path) -> None:
    for name, text in (AMAZON | {"adj_list": "0\n1\n2\n"}).items():
        (tmp_path / f"{name}.txt").write_text(text)
    assert amazon(tmp_path).edges.shape == (2, 0)


def write_ppi(folder: Path, links: Any = None, **arrays: Any) -> None:
    for split in ("train", "valid", "test"):
        graph = {"links": [{"source": 0, "target": 1}], "directed": False}
        (folder / f"{split}_graph.json").write_text(json.dumps(graph))
        full = {"feats": np.ones((3, 2)), "labels": np.ones((3, 4)), "graph_id": np.ones(3)}
        for name, array in full.items():
            np.save(folder / f"{split}_{name}.npy", array)
    for name, array in arrays.items():
        np.save(folder / f"train_{name}.npy", array)
    if links is not None:
        text = links if isinstance(links, str) else json.dumps(links)
        (folder / "train_graph.json").write_text(text)


@pytest.mark.parametrize(
    ("links", "message"),
    [
        ("{", "train_graph.json is not as expected"),
        ([], "train_graph.json is not as expected"),
        ({"nodes": []}, "train_graph.json has neither links nor edges; it has nodes"),
        ({"links": [{"source": 0}]}, "train_graph.json is not as expected"),
        ({"links": [{"source": 0.5, "target": 1}]}, "train_graph.json is not as expected"),
        ({"links": [{"source": 0, "target": 3}]}, "train_graph.json.*0 to 2, got 0 to 3"),
    ],
)
def test_links_of_tissues(tmp_path: Path, links: Any, message: str) -> None:
    write_ppi(tmp_path, links)
    with pytest.raises(DataError, match=message):
        ppi(tmp_path)


def test_rows_of_tissues_are_aligned(tmp_path: Path) -> None:
    for name, array, message in (
        ("labels", np.ones((2, 4)), "train_labels.npy.*3 nodes, but 2 rows"),
        ("feats", np.ones((4, 2)), "train_feats.npy.*3 nodes, but 4 rows"),
        ("labels", np.ones(3), "must have a row for each node"),
        ("feats", np.ones((3, 5)), "is not as expected"),  # the other splits have 2 features
        ("graph_id", np.array([1, 2, 1]), "in the order of train_graph_id.npy"),
    ):
        write_ppi(tmp_path, **{name: array})
        with pytest.raises(DataError, match=message):
            ppi(tmp_path)
    (tmp_path / "train_feats.npy").write_bytes(b"")
    with pytest.raises(DataError, match=r"cannot read .*train_feats\.npy"):
        ppi(tmp_path)


@pytest.mark.parametrize(("links", "edges"), [({"links": []}, 4), ({"edges": []}, 4), (None, 6)])
def test_tissues_may_have_no_links_or_call_them_edges(
    tmp_path: Path, links: Any, edges: int
) -> None:
    write_ppi(tmp_path, links)
    assert ppi(tmp_path).edges.shape == (2, edges)


def test_an_archive_of_tissues(tmp_path: Path) -> None:
    arrays: dict[str, Any] = {
        "edge_index": [[0], [1]], "node_ptr": [0, 2, 3, 4, 5], "split": [0, 0, 0, 1],
        "x_bits": np.ones((5, 1), np.uint8), "x_dim": 3, "y_bits": np.ones((5, 1), np.uint8),
        "y_dim": 2,
    }  # fmt: skip
    path = tmp_path / "ppi_ohmnet_trainval.npz"
    write_archive(path, arrays)
    assert ppi(tmp_path).test == (3,)
    for changes, message in (
        ({"x_dim": None}, "lacks x_dim"),
        ({"y_bits": np.ones((4, 1), np.uint8)}, "5 nodes, but 4 rows"),
        ({"split": [0, 0, 1]}, "split must say 0"),
        ({"split": [0, 0, 1, 1]}, "at least 3"),
        ({"x_bits": np.ones((5, 1))}, "is not as expected"),
    ):
        write_archive(path, arrays, **changes)
        with pytest.raises(DataError, match=message):
            ppi(tmp_path)


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("allx", np.eye(3), "ind.cora.allx must hold SparseRows, got ndarray"),
        ("graph", [], "ind.cora.graph must hold dict, got list"),
        ("ally", np.eye(2), "ind.cora.allx: there are 2 nodes, but 3 rows"),
        ("ty", np.eye(2), "test.index: there are 1 nodes, but 2 rows"),
        ("graph", {0: [9]}, "ind.cora.graph.*0 to 3, got 0 to 9"),
        ("graph", {0: ["1"]}, "is not as expected"),
        ("test.index", "three\n", "test.index must hold numbers"),
        ("test.index", "", "test.index: there are 0 nodes, but 1 rows"),
        ("test.index", "-1\n", "must name nodes 0 to 2, got -1"),
    ],
)
def test_planetoid_files(tmp_path: Path, part: str, value: Any, message: str) -> None:
    sparse = pytest.importorskip("scipy.sparse")
    parts = {
        "allx": sparse.csr_matrix(np.eye(3)), "tx": sparse.csr_matrix(np.eye(3)[:1]),
        "y": np.eye(2)[:1], "ally": np.eye(2)[[0, 1, 0]], "ty": np.eye(2)[:1],
        "graph": {0: [1], 1: [0]}, "test.index": "3\n",
    }  # fmt: skip
    for name, each in (parts | {part: value}).items():
        path = tmp_path / f"ind.cora.{name}"
        content = each.encode() if isinstance(each, str) else pickle.dumps(each, protocol=2)
        path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        planetoid(tmp_path, "cora")
