"""Public data sets of graphs from disk, in the forms in which they are published.

Pickles may hold arrays only.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deq_zoo.arrays import read_archive, read_array, require
from deq_zoo.errors import DataError, MissingPackage
from deq_zoo.ignn.data import GraphSet, NodeSet, divide_by_sums, split_by_class
from deq_zoo.ignn.edges import check_edges, check_rows, checked_splits, edge_pairs, once, undirected
from deq_zoo.ignn.files import (
    SparseRows,
    existing,
    find_file,
    read_pickle,
    read_table,
    taking_apart,
)
from deq_zoo.packages import install


def planetoid(root: str | Path | None, name: str) -> NodeSet:
    """Read Cora, Citeseer or Pubmed with the split of the Planetoid files.

    Reads `<name>.npz`, or `ind.<name>.allx` and its companions.
    """
    parts = ", ".join(f"ind.{name}.{part}" for part in (*_PLANETOID_PARTS, "test.index"))
    hint = f"{name}.npz, or the files {parts}"
    path = find_file(root, (f"{name}.npz", f"ind.{name}.allx"), hint)
    with taking_apart(path):
        return _node_archive(path) if path.suffix == ".npz" else _planetoid_files(path.parent, name)


def _planetoid_files(folder: Path, name: str) -> NodeSet:
    parts = {}
    for part, kind in _PLANETOID_PARTS.items():
        path = folder / f"ind.{name}.{part}"
        parts[part] = read_pickle(path)
        if not isinstance(parts[part], kind):
            raise DataError(f"{path} must hold {kind.__name__}, got {type(parts[part]).__name__}")
    test_index = folder / f"ind.{name}.test.index"
    order = read_table(test_index, np.int64).ravel()
    x, y = parts["allx"].dense(), parts["ally"]
    tx, ty = parts["tx"].dense(), parts["ty"]
    with_rows, n = len(y), max(len(y), int(order.max(initial=-1)) + 1)
    pairs = edge_pairs((i, j) for i, ends in parts["graph"].items() for j in ends)
    check_rows(folder / f"ind.{name}.allx", with_rows, x)
    check_rows(test_index, len(order), tx, ty)
    check_edges(folder / f"ind.{name}.graph", pairs, (n,))
    labelled = len(parts["y"])
    features, labels = np.zeros((n, x.shape[1]), np.float32), np.zeros((n, y.shape[1]), np.int64)
    features[:with_rows], labels[:with_rows] = x, y  # some test nodes have no row
    features[order], labels[order] = tx, ty
    return checked_splits(
        test_index,
        NodeSet(
            undirected(pairs),
            divide_by_sums(torch.from_numpy(features)),
            torch.from_numpy(labels).argmax(1),
            torch.arange(labelled),
            torch.arange(labelled, max(labelled, min(labelled + 500, with_rows))),
            torch.from_numpy(np.sort(order)),
        ),
    )


_PLANETOID_PARTS = {
    "tx": SparseRows, "allx": SparseRows, "y": np.ndarray, "ty": np.ndarray, "ally": np.ndarray,
    "graph": dict,
}  # fmt: skip


def amazon_photo(root: str | Path | None, seed: int = 0) -> NodeSet:
    """Read co-purchases of photographic goods.

    20 nodes of each class are for training, 30 for validation, the others for the test.
    """
    names = ("amazon_photo.npz", "amazon_electronics_photo.npz")
    path = find_file(root, names, " or ".join(names))
    with taking_apart(path):
        return _node_archive(path, seed)


def amazon(root: str | Path | None, portion: str = "0.06", seed: int = 0) -> NodeSet:
    """Read Amazon's multi-label products, `adj_list.txt` and its companions.

    Every node is its own feature. The files have no validation nodes: a tenth of the training nodes
    serve.
    """
    needed = f"adj_list.txt, label.txt, meta.txt, train_idx-{portion}.txt, test_idx.txt"
    folder = find_file(root, ("adj_list.txt",), needed).parent
    with taking_apart(folder / "meta.txt"):
        n, classes = (int(word) for word in existing(folder / "meta.txt").read_text().split()[:2])
    y = torch.from_numpy(read_table(folder / "label.txt", np.float32))
    if y.shape != (n, classes):
        raise DataError(f"{folder}: meta.txt says {n} x {classes}, label.txt is {tuple(y.shape)}")
    path = folder / "adj_list.txt"
    with taking_apart(path):
        lines = [line.split() for line in path.read_text().rstrip().splitlines()]
        edges = edge_pairs((k, int(word)) for k, words in enumerate(lines) for word in words[1:])
    check_edges(path, edges, (n,), lines)
    path = folder / f"train_idx-{portion}.txt"
    train = torch.from_numpy(read_table(path, np.int64)).flatten()
    test = torch.from_numpy(read_table(folder / "test_idx.txt", np.int64)).flatten()
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))
    val, train = train[order].tensor_split((max(1, len(train) // 10),))
    return checked_splits(path, NodeSet(undirected(edges), None, y, train, val, test))


def ppi(root: str | Path | None) -> GraphSet:
    """Read proteins in 24 tissues with 121 labels: PyG's raw files, or OhmNet's as an archive.

    The archive has 20 graphs to train on and 2 to validate on, and labels of its own. Here these 2
    are the test graphs, and the last 2 of the others the validation graphs.
    """
    hint = (
        "train_graph.json, train_feats.npy, train_labels.npy and train_graph_id.npy, and the same "
        "for valid and test"
    )
    path = find_file(root, ("train_graph.json", "ppi_ohmnet_trainval.npz"), hint)
    with taking_apart(path):
        return _ohmnet(path) if path.suffix == ".npz" else _graphsage(path.parent)


def tu(root: str | Path | None, name: str) -> GraphSet:
    """Read a set of TU Dortmund: `<name>_A.txt` and its companions, or `<name>.npz`.

    MUTAG comes with the package grakel and needs no folder.
    """
    hint = (
        f"{name}_A.txt, {name}_graph_indicator.txt, {name}_graph_labels.txt, {name}_node_labels.txt"
    )
    folder = _inside_grakel() if root is None and name == "MUTAG" else root
    path = find_file(folder, (f"{name}_A.txt", f"{name}.npz"), hint)
    with taking_apart(path):
        return _tu_texts(path, name) if path.suffix == ".txt" else _tu_archive(path)


def _graphsage(folder: Path) -> GraphSet:
    edges, xs, ys, splits = [], [], [], []
    sizes: list[int] = []
    nodes = 0
    for split in ("train", "valid", "test"):
        x = read_array(folder / f"{split}_feats.npy").astype(np.float32)
        owner = torch.from_numpy(read_array(folder / f"{split}_graph_id.npy").astype(np.int64))
        y = read_array(folder / f"{split}_labels.npy").astype(np.float32)
        if x.ndim != 2 or y.ndim != 2 or not bool((owner.diff() >= 0).all()):
            raise DataError(
                f"{folder}: {split}_feats.npy and {split}_labels.npy must have a row for each node,"
                f" in the order of {split}_graph_id.npy"
            )
        counts = torch.unique_consecutive(owner, return_counts=True)[1].tolist()
        path = folder / f"{split}_graph.json"
        pairs, directed = _links(path)
        check_rows(folder / f"{split}_feats.npy", len(owner), x)
        check_rows(folder / f"{split}_labels.npy", len(owner), y)
        check_edges(path, pairs, counts)
        splits.append(tuple(range(len(sizes), len(sizes) + len(counts))))
        edges.append((pairs if directed else undirected(pairs)) + nodes)
        sizes += counts
        xs.append(torch.from_numpy(x))
        ys.append(torch.from_numpy(y))
        nodes += len(x)
    if not all(splits):
        raise DataError(f"{folder} must hold graphs for training, validation and test")
    train, val, test = splits
    every = once(torch.cat(edges, dim=1))
    return GraphSet(every, tuple(sizes), torch.cat(xs), torch.cat(ys), train, val, test)


def _links(path: Path) -> tuple[Tensor, bool]:
    """Read the edges of a graph as networkx writes it, and whether they have a direction."""
    with taking_apart(path):
        graph = json.loads(existing(path).read_text())
        links = graph.get("links", graph.get("edges"))
        if links is None:
            raise DataError(f"{path} has neither links nor edges; it has {', '.join(graph)}")
        return edge_pairs((e["source"], e["target"]) for e in links), bool(graph.get("directed"))


def _ohmnet(path: Path) -> GraphSet:
    arrays = read_archive(
        path, "edge_index", "node_ptr", "split", "x_bits", "x_dim", "y_bits", "y_dim"
    )
    x, y = (
        torch.from_numpy(np.unpackbits(arrays[f"{c}_bits"], axis=1)[:, : int(arrays[f"{c}_dim"])])
        for c in "xy"
    )
    train, test = (tuple(np.flatnonzero(arrays["split"] == k).tolist()) for k in (0, 1))
    edges = torch.from_numpy(arrays["edge_index"].astype(np.int64))
    sizes = tuple(np.diff(arrays["node_ptr"]).tolist())
    check_edges(path, edges, sizes, x, y)
    if len(arrays["split"]) != len(sizes) or len(train) < 3 or not test:
        raise DataError(
            f"{path}: split must say 0 (training, at least 3) or 1 (test) for each of {len(sizes)} "
            "graphs"
        )
    both = undirected(edges)
    return GraphSet(both, sizes, x.float(), y.float(), train[:-2], train[-2:], test)


def _tu_texts(path: Path, name: str) -> GraphSet:
    def numbers(part: str) -> NDArray[Any]:
        return read_table(path.with_name(f"{name}_{part}.txt"), np.int64, ",")

    owner, labels = numbers("graph_indicator").ravel(), numbers("graph_labels").ravel()
    pairs, kinds = numbers("A"), numbers("node_labels")[:, 0]
    if not len(owner) or owner[0] < 1 or (np.diff(owner) < 0).any() or owner[-1] > len(labels):
        raise DataError(
            f"{path.with_name(f'{name}_graph_indicator.txt')} must list the nodes graph by graph, "
            f"with graphs from 1 to {len(labels)}, the number of graph labels"
        )
    if len(pairs) and pairs.shape[1] != 2:
        raise DataError(f"{path} must hold two nodes on each line, got {pairs.shape[1]}")
    check_rows(path.with_name(f"{name}_node_labels.txt"), len(owner), kinds)
    edges = torch.from_numpy(pairs).reshape(-1, 2).mT - 1
    sizes = np.bincount(owner - 1, minlength=len(labels))
    return _graph_set(path, edges, sizes, kinds, labels)


def _tu_archive(path: Path) -> GraphSet:
    arrays = read_archive(path, "node_ptr", "edge_index", "node_label", "graph_label")
    edges = torch.from_numpy(arrays["edge_index"].astype(np.int64))
    sizes, kinds, labels = np.diff(arrays["node_ptr"]), arrays["node_label"], arrays["graph_label"]
    return _graph_set(path, edges, sizes, kinds, labels)


def _graph_set(
    where: Path, edges: Tensor, sizes: NDArray[Any], kinds: NDArray[Any], labels: NDArray[Any]
) -> GraphSet:
    check_edges(where, edges, sizes.tolist(), kinds)
    if len(labels) != len(sizes):
        raise DataError(f"{where}: {len(sizes)} graphs have {len(labels)} labels")
    kind = torch.from_numpy(np.unique(kinds, return_inverse=True)[1].astype(np.int64))
    names, label = np.unique(labels, return_inverse=True)
    x = torch.nn.functional.one_hot(kind).float()
    y = torch.from_numpy(label.astype(np.int64))
    nodes = tuple(int(size) for size in sizes)
    return GraphSet(undirected(edges), nodes, x, y, class_names=tuple(map(str, names.tolist())))


def _node_archive(path: Path, seed: int = 0) -> NodeSet:
    """Read a graph in the form of Planetoid sets (`x_*`) or of co-purchases (`attr_*`)."""
    arrays = read_archive(path)
    if "edge_index" in arrays:
        require(path, arrays, "y", "x_indices", "x_indptr", "x_shape")
        edges, prefix, y = arrays["edge_index"], "x", arrays["y"]
    elif "adj_indptr" in arrays:
        needed = "adj_indices", "labels", "attr_indices", "attr_indptr", "attr_shape"
        require(path, arrays, *needed)
        ends = np.diff(arrays["adj_indptr"])
        edges = np.stack((np.repeat(np.arange(len(ends)), ends), arrays["adj_indices"]))
        prefix, y = "attr", arrays["labels"]
    else:
        raise DataError(f"{path} must hold edge_index, x_* and y, or adj_*, attr_* and labels")
    x = torch.from_numpy(SparseRows.of(arrays, prefix).dense())
    if y.ndim != 1:
        raise DataError(f"{path} must hold one class for each node, got labels of shape {y.shape}")
    label, pairs = (torch.from_numpy(array.astype(np.int64)) for array in (y, edges))
    check_edges(path, pairs, (len(label),), x)
    if "train_idx" in arrays:
        require(path, arrays, *(f"{split}_idx" for split in _SPLITS))
        parts = [torch.from_numpy(arrays[f"{s}_idx"].astype(np.int64)) for s in _SPLITS]
        train, val, test = parts
    else:
        train, val, test = split_by_class(label, 20, 30, seed)
    return checked_splits(
        path, NodeSet(undirected(pairs), divide_by_sums(x), label, train, val, test)
    )


_SPLITS = ("train", "val", "test")


def _inside_grakel() -> Path:
    package = find_spec("grakel")
    if package is None or package.origin is None:
        raise MissingPackage(
            f"MUTAG comes with the package grakel: {install('graphs')}, or name a --data-dir"
        )
    return Path(package.origin).parent / "tests" / "data" / "MUTAG"
