"""Tasks on one graph: classes or labels of its nodes; and what all tasks on graphs share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deq_zoo.errors import ZooError
from deq_zoo.ignn import readers
from deq_zoo.ignn.convert import from_authors
from deq_zoo.ignn.data import NodeSet, chains
from deq_zoo.ignn.download import download
from deq_zoo.ignn.graph import Graphs
from deq_zoo.ignn.metrics import f1_scores, oracle_labels
from deq_zoo.ignn.model import IGNNConfig, NodeIGNN, Output
from deq_zoo.metrics import accuracy
from deq_zoo.record import SolverRecord
from deq_zoo.task import WHOLE, Evaluation, Loss, Picture, Score, Shard, Task
from torchdeq import DEQConfig, SolverStat

PLAIN = {"norm_type": "none"}  # options of a DEQ without a norm


class IGNNTask(Task):
    """A task on graphs: options of the network, metrics, and weights of the authors."""

    net: IGNNConfig
    deq: DEQConfig

    @property
    def options(self) -> DEQConfig:
        """The DEQ's options, the norm among them: a config from a file gives every option."""
        return self.deq.with_options(norm_type=self.deq.norm_type)

    @property
    @abstractmethod
    def least_rho(self) -> float:
        """The smallest Perron root that training meets."""

    @abstractmethod
    def judge(self, split: str, logits: Tensor, y: Tensor) -> dict[str, float]:
        """Return the metrics of a split, whose name comes before theirs."""

    def after_step(self, model: nn.Module) -> None:
        model.project_(self.least_rho)  # type: ignore[operator]

    def convert(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return from_authors(self.build(), state)


@dataclass(frozen=True)
class WholeTask(IGNNTask):
    """Nodes of one graph, of which some are labelled, all of it at every step."""

    deq: DEQConfig = field(default_factory=lambda: DEQConfig(PLAIN))
    net: IGNNConfig = field(default_factory=IGNNConfig)
    warm: bool = False
    split_seed: int = 0
    data_dir: str | None = None
    download: bool = False

    @property
    @abstractmethod
    def nodes(self) -> NodeSet:
        """The data."""

    @cached_property
    def graph(self) -> Graphs:
        return self.nodes.graph()

    @cached_property
    def _placed(self) -> dict[torch.device, tuple[Tensor | None, Graphs, Tensor]]:
        return {}

    def on(self, device: torch.device) -> tuple[Tensor | None, Graphs, Tensor]:
        """Features, graph and labels on a device, moved once."""
        if device not in self._placed:
            x, y = self.nodes.x, self.nodes.y
            x = None if x is None else x.to(device)
            self._placed[device] = (x, self.graph.to(device), y.to(device))
        return self._placed[device]

    @property
    def least_rho(self) -> float:
        return float(self.graph.rho.min())

    def build(self) -> nn.Module:
        model = NodeIGNN(self.nodes.features, self.nodes.classes, self.net, self.options)
        model.project_(self.least_rho)
        return model

    @property
    def steps_per_epoch(self) -> int:
        return 1 if len(self.nodes.train) else 0

    def train_batch(self, step: int, seed: int, shard: Shard = WHOLE) -> Tensor:
        train = self.nodes.train
        if shard.world > len(train):
            raise ZooError(
                f"{len(train)} training nodes cannot be divided among {shard.world} processes"
            )
        return train[shard.rank :: shard.world]

    def loss(self, model: nn.Module, batch: Tensor, carry: Any) -> Loss:
        x, graph, y = self.on(batch.device)
        out: Output = model(x, graph, carry if self.warm else None)
        value = node_loss(out.logits[batch], y[batch])
        return Loss(value, stats=hardest(out.stats), carry=out.states if self.warm else None)

    def evaluate(self, model: nn.Module, device: torch.device, thorough: bool) -> Evaluation:
        record = SolverRecord()
        x, graph, y = self.on(device)
        out: Output = model(x, graph, sradius_mode=thorough)
        record.add(hardest(out.stats))
        metrics: dict[str, float] = {}
        for name in ("val", "test"):
            rows = getattr(self.nodes, name).to(device)
            metrics |= self.judge(name, out.logits[rows], y[rows])
        return Evaluation(metrics, record)


@dataclass(frozen=True)
class NodeTask(WholeTask):
    """Classes of nodes: chains, citations, co-purchases.

    Args:
        deq: options of the equilibrium.
        net: the shape of the network.
        warm: whether each solve starts where the last one ended.
        split_seed: of splits that the data does not come with.
        data_dir: folder of the set's files.
        download: whether PyG may fetch them into that folder.
        data: which set.
        length: nodes in a chain.
    """

    score: ClassVar[Score] = Score("val_accuracy", "%")

    data: Literal["chains", "cora", "citeseer", "pubmed", "photo"] = "chains"
    length: int = 10

    @cached_property
    def nodes(self) -> NodeSet:
        """The data."""
        if self.download:
            download(self.data_dir, self.data)
        if self.data == "chains":
            return chains(self.length)
        if self.data == "photo":
            return readers.amazon_photo(self.data_dir, self.split_seed)
        return readers.planetoid(self.data_dir, self.data)

    def judge(self, split: str, logits: Tensor, y: Tensor) -> dict[str, float]:
        return {f"{split}_accuracy": accuracy(logits, y)}

    @torch.no_grad()
    def pictures(self, model: nn.Module, device: torch.device) -> list[Picture]:
        from deq_zoo.ignn.pictures import chain_map, state_map

        x, graph, y = self.on(device)
        out: Output = model(x, graph)
        if self.data == "chains":
            right = out.logits.softmax(1).gather(1, y[:, None]).view(-1, self.length)
            return [chain_map(right.cpu(), y[:: self.length].cpu())]
        rows = self.nodes.test.to(device)
        if not len(rows):
            return []
        return [state_map(out.states[0][rows].cpu(), y[rows].cpu(), "node")]


@dataclass(frozen=True)
class NodeLabelTask(WholeTask):
    """Several labels for each node; how many it has is known when it is judged.

    Args:
        data: which set.
        portion: of Amazon's nodes to train on, as in its file names.

    The others: see `NodeTask`.
    """

    score: ClassVar[Score] = Score("val_micro_f1", "%")

    data: Literal["amazon"] = "amazon"
    portion: str = "0.06"

    @cached_property
    def nodes(self) -> NodeSet:
        """The data."""
        if self.download:
            download(self.data_dir, self.data)
        return readers.amazon(self.data_dir, self.portion, self.split_seed)

    def judge(self, split: str, logits: Tensor, y: Tensor) -> dict[str, float]:
        return f1_scores(split, oracle_labels(logits, y), y)

    @torch.no_grad()
    def pictures(self, model: nn.Module, device: torch.device) -> list[Picture]:
        from deq_zoo.ignn.pictures import label_scores

        x, graph, y = self.on(device)
        rows = self.nodes.test.to(device)
        marked = oracle_labels(model(x, graph).logits[rows], y[rows])
        return [label_scores(marked.cpu(), y[rows].cpu())]


def node_loss(logits: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of classes, or of every label on its own."""
    if y.dim() == 2:
        return F.binary_cross_entropy_with_logits(logits, y.to(logits.dtype))
    return F.cross_entropy(logits, y)


def hardest(stats: Sequence[SolverStat]) -> SolverStat:
    """Of the layers' solves, the one that took most evaluations."""
    return max(stats, key=lambda stat: stat.nfe)
