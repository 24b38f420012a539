"""Public data sets of graphs from disk, in the forms in which they are published.

Nothing is downloaded unless asked for, and pickles may hold arrays only.
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

from deq_zoo.errors import DataError, ZooError
from deq_zoo.ignn.data import GraphSet, NodeSet, split_by_class
from deq_zoo.ignn.files import (
    SparseRows,
    existing,
    find_file,
    read_archive,
    read_array,
    read_table,
    unpickle_arrays,
)

PLANETOID = ("cora", "citeseer", "pubmed")
EXTRA = "pip install 'torchdeq[graphs]'"


def planetoid(root: str | Path | None, name: str) -> NodeSet:
    """Cora, Citeseer or Pubmed with the split of the Planetoid files.

    Reads ``<name>.npz``, or ``ind.<name>.allx`` and its companions.
    """
    parts = ", ".join(f"ind.{name}.{part}" for part in (*_PLANETOID_PARTS, "test.index"))
    hint = f"{name}.npz, or the files {parts}"
    path = find_file(root, (f"{name}.npz", f"ind.{name}.allx"), hint)
    if path.suffix == ".npz":
        return _node_archive(path)
    held = {
        part: unpickle_arrays(path.with_name(f"ind.{name}.{part}")) for part in _PLANETOID_PARTS
    }
    order = np.loadtxt(existing(path.with_name(f"ind.{name}.test.index")), dtype=np.int64)
    known, n = len(held["ally"]), max(len(held["ally"]), int(order.max()) + 1)
    x = np.zeros((n, held["allx"].shape[1]), dtype=np.float32)  # some test nodes have no row
    y = np.zeros((n, held["ally"].shape[1]), dtype=np.int64)
    x[:known], y[:known] = held["allx"].dense(), held["ally"]
    x[order], y[order] = held["tx"].dense(), held["ty"]
    pairs = [(i, j) for i, ends in held["graph"].items() for j in ends]
    edges = _undirected(torch.tensor(pairs, dtype=torch.int64).mT)
    labelled = len(held["y"])
    return NodeSet(
        edges,
        _rows_to_one(torch.from_numpy(x)),
        torch.from_numpy(y).argmax(1),
        torch.arange(labelled),
        torch.arange(labelled, labelled + 500),
        torch.from_numpy(np.sort(order)),
    )


_PLANETOID_PARTS = ("tx", "allx", "y", "ty", "ally", "graph")


def amazon_photo(root: str | Path | None, seed: int = 0) -> NodeSet:
    """Co-purchases of photographic goods; 20 nodes of each class to train on, 30 to choose by."""
    names = ("amazon_photo.npz", "amazon_electronics_photo.npz")
    return _node_archive(find_file(root, names, " or ".join(names)), seed)


def amazon(root: str | Path | None, portion: str = "0.06", seed: int = 0) -> NodeSet:
    """Amazon's multi-label products, ``adj_list.txt`` and its companions; features are nodes.

    The files have no nodes to choose a model by: a tenth of the training nodes are taken for that.
    """
    needed = f"adj_list.txt, label.txt, meta.txt, train_idx-{portion}.txt, test_idx.txt"
    folder = find_file(root, ("adj_list.txt",), needed).parent
    n, classes = (int(word) for word in existing(folder / "meta.txt").read_text().split()[:2])
    y = torch.from_numpy(read_table(folder / "label.txt", np.float32))
    if y.shape != (n, classes):
        raise DataError(f"{folder}: meta.txt says {n} x {classes}, label.txt is {tuple(y.shape)}")
    pairs = []
    for node, line in enumerate((folder / "adj_list.txt").read_text().splitlines()):
        pairs += [(node, int(word)) for word in line.split()[1:]]
    edges = _undirected(torch.tensor(pairs, dtype=torch.int64).mT)
    train = torch.from_numpy(read_table(folder / f"train_idx-{portion}.txt", np.int64)).flatten()
    test = torch.from_numpy(read_table(folder / "test_idx.txt", np.int64)).flatten()
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))
    val, train = train[order].tensor_split((len(train) // 10,))
    return NodeSet(edges, None, y, train, val, test)


def ppi(root: str | Path | None) -> GraphSet:
    """Proteins in 24 tissues with 121 labels: PyG's raw files, or OhmNet's graphs as an archive.

    The archive has 20 graphs to train on and 2 to validate on, and labels of its own. Here the 2
    are judged by, and the last 2 of the others chosen by.
    """
    hint = (
        "train_graph.json, train_feats.npy, train_labels.npy and train_graph_id.npy, and the same "
        "for valid and test"
    )
    path = find_file(root, ("train_graph.json", "ppi_ohmnet_trainval.npz"), hint)
    return _ohmnet(path) if path.suffix == ".npz" else _graphsage(path.parent)


def tu(root: str | Path | None, name: str) -> GraphSet:
    """A set of TU Dortmund: ``<name>_A.txt`` and its companions, or ``<name>.npz``.

    MUTAG comes with the package grakel and needs no folder.
    """
    if root is None and name == "MUTAG":
        return _tu_texts(_inside_grakel() / "MUTAG_A.txt", name)
    hint = (
        f"{name}_A.txt, {name}_graph_indicator.txt, {name}_graph_labels.txt, {name}_node_labels.txt"
    )
    path = find_file(root, (f"{name}_A.txt", f"{name}.npz"), hint)
    return _tu_texts(path, name) if path.suffix == ".txt" else _tu_archive(path)


def download(root: str | Path, name: str) -> None:
    """Let PyG fetch Planetoid, PPI, Amazon Photo or a TU set into a folder; needs the network."""
    try:
        from torch_geometric import datasets  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        raise ZooError(f"downloads are PyG's, which is not installed: {EXTRA}") from None
    if name in PLANETOID:
        datasets.Planetoid(str(root), name)
    elif name == "ppi":
        datasets.PPI(str(root))
    elif name == "photo":
        datasets.Amazon(str(root), "photo")
    else:
        datasets.TUDataset(str(root), name)


def _graphsage(folder: Path) -> GraphSet:
    edges, xs, ys, splits = [], [], [], []
    sizes: list[int] = []
    nodes = 0
    for split in ("train", "valid", "test"):
        x = read_array(folder / f"{split}_feats.npy").astype(np.float32)
        owner = torch.from_numpy(read_array(folder / f"{split}_graph_id.npy").astype(np.int64))
        told = json.loads(existing(folder / f"{split}_graph.json").read_text())
        pairs = torch.tensor([(e["source"], e["target"]) for e in told["links"]]).mT
        if not bool((owner.diff() >= 0).all()) or len(owner) != len(x):
            raise DataError(f"{folder}: nodes of {split} must be in the order of their graphs")
        counts = torch.unique_consecutive(owner, return_counts=True)[1].tolist()
        splits.append(tuple(range(len(sizes), len(sizes) + len(counts))))
        edges.append(_undirected(pairs) + nodes if not told.get("directed") else pairs + nodes)
        sizes += counts
        xs.append(torch.from_numpy(x))
        ys.append(torch.from_numpy(read_array(folder / f"{split}_labels.npy").astype(np.float32)))
        nodes += len(x)
    return GraphSet(
        _once(torch.cat(edges, dim=1)), tuple(sizes), torch.cat(xs), torch.cat(ys), *splits
    )


def _ohmnet(path: Path) -> GraphSet:
    held = read_archive(path, "edge_index", "node_ptr", "split", "x_bits", "y_bits")
    x, y = (
        torch.from_numpy(np.unpackbits(held[f"{c}_bits"], axis=1)[:, : int(held[f"{c}_dim"])])
        for c in "xy"
    )
    train, test = (tuple(np.flatnonzero(held["split"] == k).tolist()) for k in (0, 1))
    edges = _undirected(torch.from_numpy(held["edge_index"].astype(np.int64)))
    sizes = tuple(np.diff(held["node_ptr"]).tolist())
    return GraphSet(edges, sizes, x.float(), y.float(), train[:-2], train[-2:], test)


def _tu_texts(path: Path, name: str) -> GraphSet:
    def numbers(part: str) -> NDArray[Any]:
        return read_table(path.with_name(f"{name}_{part}.txt"), np.int64, ",")

    owner, labels = numbers("graph_indicator").ravel(), numbers("graph_labels").ravel()
    kinds = numbers("node_labels").reshape(len(owner), -1)[:, 0]
    edges = torch.from_numpy(numbers("A").astype(np.int64)).mT - 1
    sizes = np.bincount(owner - 1, minlength=len(labels))
    if (np.diff(owner) < 0).any() or len(sizes) != len(labels):
        raise DataError(f"{path.parent}: {name} must list its nodes graph by graph")
    return _graph_set(edges, sizes, kinds, labels)


def _tu_archive(path: Path) -> GraphSet:
    held = read_archive(path, "node_ptr", "edge_index", "node_label", "graph_label")
    edges = torch.from_numpy(held["edge_index"].astype(np.int64))
    return _graph_set(edges, np.diff(held["node_ptr"]), held["node_label"], held["graph_label"])


def _graph_set(
    edges: Tensor, sizes: NDArray[Any], kinds: NDArray[Any], labels: NDArray[Any]
) -> GraphSet:
    kind = torch.from_numpy(np.unique(kinds, return_inverse=True)[1].astype(np.int64))
    label = torch.from_numpy(np.unique(labels, return_inverse=True)[1].astype(np.int64))
    x = torch.nn.functional.one_hot(kind).float()
    return GraphSet(edges, tuple(int(size) for size in sizes), x, label)


def _node_archive(path: Path, seed: int = 0) -> NodeSet:
    """A graph in the form of Planetoid sets (``x_*``) or of co-purchases (``attr_*``)."""
    held = read_archive(path)
    if "edge_index" in held:
        edges, prefix, y = held["edge_index"], "x", held["y"]
    elif "adj_indptr" in held:
        ends = np.diff(held["adj_indptr"])
        edges = np.stack((np.repeat(np.arange(len(ends)), ends), held["adj_indices"]))
        prefix, y = "attr", held["labels"]
    else:
        raise DataError(f"{path} must hold edge_index, x_* and y, or adj_*, attr_* and labels")
    x = torch.from_numpy(SparseRows.of(held, prefix).dense())
    label = torch.from_numpy(y.astype(np.int64))
    if "train_idx" in held:
        parts = [torch.from_numpy(held[f"{s}_idx"].astype(np.int64)) for s in _SPLITS]
        train, val, test = parts
    else:
        train, val, test = split_by_class(label, 20, 30, seed)
    both = _undirected(torch.from_numpy(edges.astype(np.int64)))
    return NodeSet(both, _rows_to_one(x), label, train, val, test)


_SPLITS = ("train", "val", "test")


def _inside_grakel() -> Path:
    found = find_spec("grakel")
    if found is None or found.origin is None:
        raise DataError(f"MUTAG comes with the package grakel: {EXTRA}, or name a --data-dir")
    return Path(found.origin).parent / "tests" / "data" / "MUTAG"


def _undirected(edges: Tensor) -> Tensor:
    """Every edge once in both directions, without loops."""
    return _once(torch.cat((edges, edges.flip(0)), dim=1))


def _once(edges: Tensor) -> Tensor:
    """Every edge once, without loops, in order."""
    n = int(edges.max()) + 1 if edges.numel() else 1
    keys = (edges[0] * n + edges[1])[edges[0] != edges[1]].unique()
    return torch.stack((keys // n, keys % n))


def _rows_to_one(x: Tensor) -> Tensor:
    """Rows that sum to 1; empty ones stay."""
    total = x.sum(dim=1, keepdim=True)
    shares: Tensor = x / torch.where(total == 0, 1.0, total)
    return shares
