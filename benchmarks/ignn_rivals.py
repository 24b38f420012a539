"""Rivals of implicit graph networks: networks of PyG, and the layout of the authors' release."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.contest import PUBLISHED
from benchmarks.mdeq import published
from deq_zoo.ignn import Graphs, ImplicitGraph
from deq_zoo.ignn.model import GraphOutput
from deq_zoo.ignn.set_task import GraphClassTask
from deq_zoo.model import Model
from deq_zoo.task import Evaluation, Loss, Shard, Split
from torchdeq import SolverStat, reset_norm


class Baseline:
    """A network of PyG in the place of ours, with the same data, split, loss and metrics."""

    def __init__(self, task: Any, kind: str, width: int, dropout: float = 0.5) -> None:
        self.task, self.kind, self.width, self.dropout = task, kind, width, dropout
        self.whole = isinstance(task, GraphClassTask)

    def with_seed(self, seed: int) -> Baseline:
        return Baseline(self.task.with_seed(seed), self.kind, self.width, self.dropout)

    def build(self) -> Model:
        facts = self.task.facts()
        features, classes = facts["features"], len(facts["classes"])
        layers = 3 if self.whole else 2
        return PyGNet(self.kind, features, classes, self.width, layers, self.dropout, self.whole)

    @property
    def steps_per_epoch(self) -> int:
        steps: int = self.task.steps_per_epoch
        return steps

    def train_batch(self, step: int, seed: int, shard: Shard) -> Any:
        return self.task.train_batch(step, seed, shard)

    def loss(self, model: nn.Module, batch: Any, carry: Any) -> Loss:
        return self.task.loss(model, batch, None)  # type: ignore[no-any-return]

    def after_step(self, model: nn.Module) -> None:
        return

    def evaluate(self, model: Model, split: Split, thorough: bool = False) -> Evaluation:
        return self.task.evaluate(model, split, thorough)  # type: ignore[no-any-return]


class PyGNet(Model):
    """GCN or GAT: convolutions, ReLU and dropout between them; a sum and a layer for graphs."""

    def __init__(
        self,
        kind: str,
        features: int,
        classes: int,
        width: int,
        layers: int,
        dropout: float,
        whole: bool,
    ) -> None:
        super().__init__()
        from torch_geometric.nn import GATConv, GCNConv  # type: ignore[import-untyped,unused-ignore]

        last = width if whole else classes
        widths = [features, *[width] * (layers - 1), last]
        if kind == "GAT":  # eight heads side by side, one at the end
            self.convs = nn.ModuleList(
                GATConv(a, b // 8 if b == width else b, heads=8 if b == width else 1)
                for a, b in pairwise(widths)
            )
        else:
            self.convs = nn.ModuleList(GCNConv(a, b) for a, b in pairwise(widths))
        self.out = nn.Linear(width, classes) if whole else nn.Identity()
        self.dropout, self.whole = dropout, whole

    def forward(self, x: Tensor, graph: Graphs, z0: Any = None, **call: Any) -> GraphOutput[Tensor]:
        edges = _edges(graph)
        for k, conv in enumerate(self.convs):
            x = conv(F.dropout(x, self.dropout if not self.whole else 0.0, self.training), edges)
            x = x if k == len(self.convs) - 1 and not self.whole else x.relu()
        if self.whole:
            x = self.out(F.dropout(graph.pool(x), self.dropout, self.training))
        return GraphOutput([x], [])


def _edges(graph: Graphs) -> Tensor:
    """Return edges for PyG, without the loops that its layers add themselves."""
    starts, target = graph.outgoing.crow_indices().long(), graph.outgoing.col_indices().long()
    source = torch.repeat_interleave(starts.diff())
    return torch.stack((source, target))[:, source != target]


def as_released(model: nn.Module) -> None:
    """Let the layers of a network compute in the layout of the release, weights as they are."""
    for module in model.modules():
        if isinstance(module, ImplicitGraph):
            module.__class__ = FeaturesFirst


class FeaturesFirst(ImplicitGraph):
    """The same layer on states (m, n), with an adjacency of unsorted coordinates.

    Only the layout is the release's: solver, projection and Perron roots stay ours.
    """

    def forward(
        self, x: Tensor | None, graph: Any, z0: Tensor | None = None, **call: Any
    ) -> tuple[list[Tensor], SolverStat]:
        assert x is not None
        reset_norm(self)
        edges = graph.outgoing.to_sparse_coo()
        shuffled = torch.randperm(edges.values().shape[0])
        A = torch.sparse_coo_tensor(
            edges.indices()[:, shuffled], edges.values()[shuffled], edges.shape,
            check_invariants=False,
        )  # fmt: skip
        assert self.Omega_2 is not None
        u = x.mT
        W = self.weight(graph)
        B = self._spread(self.Omega_1 @ u, A) + self.Omega_2 @ u

        def f(z: Tensor) -> Tensor:
            return (self._spread(W @ z[0], A) + B).relu()[None]

        states, stats = self.deq(f, B.detach()[None], **call)
        return [z[0].mT for z in states], stats

    @staticmethod
    def _spread(z: Tensor, A: Tensor) -> Tensor:
        spread: Tensor = torch.sparse.mm(A.t(), z.mT).mT
        return spread


def on_published(model: nn.Module) -> None:
    """Let released layers solve with torchdeq 0.1.0, for which each feature is a sample."""
    deq = published(PUBLISHED).get_deq(
        f_solver="fixed_point_iter", f_max_iter=40, f_tol=1e-4, f_stop_mode="rel", grad=5, tau=0.5
    )
    for module in model.modules():
        if isinstance(module, FeaturesFirst):
            module.deq = PublishedRows(deq)  # type: ignore[assignment]


class PublishedRows(nn.Module):
    """0.1.0's DEQ on the state without the axis of one graph."""

    def __init__(self, deq: nn.Module) -> None:
        super().__init__()
        self.deq = deq

    def forward(self, f: Any, z0: Tensor, **call: Any) -> Any:
        states, stats = self.deq(lambda z: f(z[None])[0], z0[0], **call)
        return [z[None] for z in states], stats
