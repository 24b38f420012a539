"""Labelled graphs as tensors: what a task trains on, chains made by rule, and splits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from deq_zoo.ignn.graph import MARGIN, Graphs, normalised_edges
from deq_zoo.task import generator


@dataclass(frozen=True, eq=False)
class NodeSet:
    """One graph with labelled nodes, some to train on, some to choose by, some to judge by.

    Args:
        edges: (2, E), sources and targets.
        x: (N, p) features; None if every node is its own feature.
        y: (N,) classes or (N, C) labels, each 0 or 1.
        train: indices of nodes, like `val` and `test`.
    """

    edges: Tensor
    x: Tensor | None
    y: Tensor
    train: Tensor
    val: Tensor
    test: Tensor

    @property
    def features(self) -> int:
        return len(self.y) if self.x is None else self.x.shape[1]

    @property
    def classes(self) -> int:
        return self.y.shape[1] if self.y.dim() == 2 else int(self.y.max()) + 1

    def graph(self) -> Graphs:
        """Its normalised adjacency with self-loops; similar to a stochastic one, its root is 1."""
        edges, weight = normalised_edges(self.edges, len(self.y))
        return Graphs.from_edges(edges, len(self.y), weight, rho=1 + MARGIN)


@dataclass(frozen=True, eq=False)
class GraphSet:
    """Many graphs, in a row, with labels for graphs or for nodes.

    Args:
        edges: (2, E) with nodes numbered over all graphs.
        sizes: nodes of each graph.
        x: (N, p) features of nodes.
        y: (G,) classes of graphs or (N, C) labels of nodes, each 0 or 1.
        train: which graphs to train on, like `val` and `test`; empty if there is no split yet.
    """

    edges: Tensor
    sizes: tuple[int, ...]
    x: Tensor
    y: Tensor
    train: tuple[int, ...] = ()
    val: tuple[int, ...] = ()
    test: tuple[int, ...] = ()

    @property
    def features(self) -> int:
        return self.x.shape[1]

    @property
    def classes(self) -> int:
        return self.y.shape[1] if self.y.dim() == 2 else int(self.y.max()) + 1

    def split(self, folds: int, fold: int, seed: int) -> GraphSet:
        """Fold `fold` to judge by, the next one to choose by, the others to train on.

        Every class is dealt out to the folds in turn, in an order that `seed` decides.
        """
        if folds < 3 or not 0 <= fold < folds:
            raise ValueError(f"needs at least 3 folds and one of them, got {fold} of {folds}")
        of = torch.empty(len(self.y), dtype=torch.int64)
        dealt = 0
        for label in self.y.unique():
            members = torch.nonzero(self.y == label).flatten()
            order = torch.randperm(len(members), generator=generator("folds", seed, int(label)))
            of[members[order]] = (torch.arange(len(members)) + dealt) % folds
            dealt += len(members)
        chosen = (fold + 1) % folds
        train = _places((of != fold) & (of != chosen))
        val, test = _places(of == chosen), _places(of == fold)
        if not (train and val and test):
            raise ValueError(
                f"{len(self.y)} graphs leave fold {fold} of {folds}, the next one or the others "
                "empty: use fewer folds"
            )
        return replace(self, train=train, val=val, test=test)

    def graphs(self, normalise: bool, rho: float | None = None) -> list[Graphs]:
        """Each graph on its own, with its Perron root or a given one."""
        owner = torch.repeat_interleave(torch.tensor(self.sizes))[self.edges[0]]
        order = owner.argsort(stable=True)
        counts = torch.bincount(owner, minlength=len(self.sizes)).tolist()
        made, first = [], 0
        for size, edges in zip(self.sizes, self.edges[:, order].split(counts, dim=1), strict=True):
            weight = None
            edges = edges - first
            if normalise:
                edges, weight = normalised_edges(edges, size)
            made.append(Graphs.from_edges(edges, size, weight, rho=rho))
            first += size
        return made

    def rows(self) -> list[slice]:
        """Where the nodes of each graph are."""
        ends = torch.tensor((0, *self.sizes)).cumsum(0).tolist()
        return [slice(a, a + size) for a, size in zip(ends, self.sizes, strict=False)]


def chains(
    length: int = 10, chains: int = 20, classes: int = 2, features: int = 100, seed: int = 42
) -> NodeSet:
    """Chains whose first node alone knows their class: how far does a network see?

    Directed edges lead from each node to the next. 20 random nodes are trained on, 100 chosen by
    and 200 judged by; if there are fewer than 400, shares of the same size.
    """
    if min(length, chains, classes) < 1 or features < classes:
        raise ValueError(
            f"needs chains of nodes and a feature for each class, got {chains} chains of "
            f"{length} nodes, {classes} classes, {features} features"
        )
    n = classes * chains * length
    node = torch.arange(n)
    y = node // (chains * length)
    first = node % length == 0
    x = torch.zeros(n, features)
    x[node[first], y[first]] = 1.0
    inner = node[node % length != length - 1]
    random = np.random.RandomState(seed)
    random.uniform(size=(n, features))  # published: noise of amplitude zero, drawn all the same
    order = np.arange(n)
    random.shuffle(order)
    counts = (20, 100, 200) if n >= 400 else (n // 20, n // 4, n // 2)
    train, val, test, _ = torch.from_numpy(order).split((*counts, n - sum(counts)))
    return NodeSet(torch.stack((inner, inner + 1)), x, y, train, val, test)


def split_by_class(y: Tensor, train: int, val: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """So many random nodes of every class to train on and to choose by; the rest to judge by."""
    parts: tuple[list[Tensor], ...] = ([], [], [])
    for label in y.unique():
        members = torch.nonzero(y == label).flatten()
        order = torch.randperm(len(members), generator=generator("classes", seed, int(label)))
        for part, chosen in zip(
            parts, members[order].tensor_split((train, train + val)), strict=True
        ):
            part.append(chosen)
    a, b, c = (torch.cat(part).sort().values for part in parts)
    return a, b, c


def random_graphs(count: int = 40, seed: int = 0) -> GraphSet:
    """Small rings and stars of random sizes, for tests; a node's feature is its degree."""
    g = generator("rings and stars", seed)
    edges, sizes, first = [], [], 0
    for k in range(count):
        n = int(torch.randint(4, 9, (), generator=g))
        node = torch.arange(n)
        source = node if k % 2 else torch.zeros_like(node)
        pairs = torch.stack((source, (node + 1) % n))
        pairs = pairs[:, pairs[0] != pairs[1]]
        edges += [pairs + first, pairs.flip(0) + first]
        sizes.append(n)
        first += n
    every = torch.cat(edges, dim=1)
    degree = torch.bincount(every[0], minlength=first).clamp(1, 3)
    x = torch.nn.functional.one_hot(degree - 1, 3).float()
    return GraphSet(every, tuple(sizes), x, torch.arange(count) % 2)


def _places(mask: Tensor) -> tuple[int, ...]:
    return tuple(torch.nonzero(mask).flatten().tolist())
