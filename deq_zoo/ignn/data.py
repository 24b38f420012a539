"""Labelled graphs as tensors, graphs made by rule, and splits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from deq_zoo.ignn.facts import numbered
from deq_zoo.ignn.graph import MARGIN, Graphs, normalised_edges
from deq_zoo.task import generator


@dataclass(frozen=True, eq=False)
class NodeSet:
    """One graph with labelled nodes, split for training, validation and test.

    Args:
        edges: (2, E), sources and targets.
        x: (N, p) features; None if every node is its own feature.
        y: (N,) classes or (N, C) labels, each 0 or 1.
        train: indices of nodes.
        val: indices of other nodes.
        test: indices of still other nodes.
    """

    edges: Tensor
    x: Tensor | None
    y: Tensor
    train: Tensor
    val: Tensor
    test: Tensor

    @property
    def features(self) -> int:
        """Return the number of features of each node."""
        return len(self.y) if self.x is None else self.x.shape[1]

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of classes or labels: their numbers."""
        return numbered(count_classes(self.y))

    def graph(self) -> Graphs:
        """Return the normalised adjacency with loops; its Perron root is 1, with a margin.

        The adjacency is similar to a stochastic matrix.
        """
        edges, weight = normalised_edges(self.edges, len(self.y))
        return Graphs.from_edges(edges, len(self.y), weight, rho=1 + MARGIN)


@dataclass(frozen=True, eq=False)
class GraphSet:
    """Many graphs, in a row, with classes of graphs or labels of nodes.

    Args:
        edges: (2, E) with nodes numbered over all graphs.
        sizes: nodes of each graph.
        x: (N, p) features of nodes.
        y: (G,) classes of graphs or (N, C) labels of nodes, each 0 or 1.
        train: numbers of the training graphs; empty if there is no split yet.
        val: numbers of the validation graphs.
        test: numbers of the test graphs.
        class_names: the names in the data; empty if it has none.
    """

    edges: Tensor
    sizes: tuple[int, ...]
    x: Tensor
    y: Tensor
    train: tuple[int, ...] = ()
    val: tuple[int, ...] = ()
    test: tuple[int, ...] = ()
    class_names: tuple[str, ...] = ()

    @property
    def features(self) -> int:
        """Return the number of features of each node."""
        return self.x.shape[1]

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of classes or labels; numbers if the data has none."""
        return self.class_names or numbered(count_classes(self.y))

    def split(self, folds: int, fold: int, seed: int) -> GraphSet:
        """Return the set with fold `fold` as test, the next one as validation, others as training.

        The graphs of every class are dealt out to the folds in turn, in an order that `seed`
        decides.
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
        """Return each graph on its own, with its Perron root or a given one."""
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
        """Return the rows of the nodes of each graph."""
        ends = torch.tensor((0, *self.sizes)).cumsum(0).tolist()
        return [slice(a, a + size) for a, size in zip(ends, self.sizes, strict=False)]


def chains(
    length: int = 10, chains: int = 20, classes: int = 2, features: int = 100, seed: int = 42
) -> NodeSet:
    """Return chains whose first node alone carries their class: how far does a network see?

    Directed edges lead from each node to the next. 20 random nodes are for training, 100 for
    validation and 200 for the test; if there are fewer than 400, shares of the same size.
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
    """Return random nodes of every class for training, for validation, and all others for the test.

    Args:
        y: (N,) classes.
        train: nodes of each class for training.
        val: nodes of each class for validation.
        seed: decides which.
    """
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
    """Return small rings and stars of random sizes, for tests; a node's feature is its degree."""
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
    y = torch.arange(count) % 2
    return GraphSet(every, tuple(sizes), x, y, class_names=("star", "ring"))


def divide_by_sums(x: Tensor) -> Tensor:
    """Return rows of features divided by their sums; rows that add up to 0 stay."""
    total = x.sum(dim=1, keepdim=True)
    shares: Tensor = x / torch.where(total == 0, 1.0, total)
    return shares


def count_classes(y: Tensor) -> int:
    """Return the number of labels (N, C), or of classes from 0 to the largest of (N,)."""
    return y.shape[1] if y.dim() == 2 else int(y.max()) + 1


def _places(mask: Tensor) -> tuple[int, ...]:
    return tuple(torch.nonzero(mask).flatten().tolist())
