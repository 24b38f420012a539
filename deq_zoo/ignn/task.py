"""Tasks on one graph: classes or labels of its nodes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from deq_zoo.errors import ZooError
from deq_zoo.ignn import readers
from deq_zoo.ignn.base import PLAIN, IGNNTask, node_loss
from deq_zoo.ignn.data import NodeSet, chains
from deq_zoo.ignn.download import download
from deq_zoo.ignn.facts import GraphFacts
from deq_zoo.ignn.graph import MARGIN, Graphs
from deq_zoo.ignn.metrics import f1_scores, oracle_labels
from deq_zoo.ignn.model import IGNN, GraphOutput, IGNNConfig, NodeIGNN
from deq_zoo.metrics import accuracy
from deq_zoo.record import SolverRecord
from deq_zoo.task import WHOLE, Evaluation, Loss, Picture, Score, Shard, Split
from torchdeq import DEQConfig


@dataclass(frozen=True)
class WholeTask(IGNNTask):
    """Nodes of one graph, of which some are labelled; every step computes the whole graph.

    Args:
        deq: options of the equilibrium.
        net: the shape of the network.
        warm: whether each solve starts from the state of the step before.
        split_seed: of splits that the data does not come with.
        data_dir: folder of the set's files.
        download: whether PyG may download them into that folder.
    """

    network = NodeIGNN
    least_rho = 1 + MARGIN  # of every normalised adjacency

    deq: DEQConfig = field(default_factory=lambda: DEQConfig(PLAIN))
    net: IGNNConfig = field(default_factory=IGNNConfig)
    warm: bool = False
    split_seed: int = 0
    data_dir: str | None = None
    download: bool = False

    @property
    @abstractmethod
    def nodes(self) -> NodeSet:
        """Return the graph with its labels and splits."""

    @property
    def train_set(self) -> Tensor:
        """Return the numbers of the training nodes."""
        return self.nodes.train

    @property
    def val_set(self) -> Tensor | None:
        """Return the numbers of the validation nodes."""
        return self.nodes.val if len(self.nodes.val) else None

    @property
    def test_set(self) -> Tensor:
        """Return the numbers of the test nodes."""
        return self.nodes.test

    @cached_property
    def graph(self) -> Graphs:
        """Return the normalised adjacency."""
        return self.nodes.graph()

    @cached_property
    def _placed(self) -> dict[Any, tuple[Tensor | None, Graphs, Tensor]]:
        return {}

    def on(
        self, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor | None, Graphs, Tensor]:
        """Return features of a dtype, graph and labels on a device; the first call moves them."""
        key = device, dtype
        if key not in self._placed:
            x, y = self.nodes.x, self.nodes.y
            x = None if x is None else x.to(device, dtype)
            self._placed[key] = (x, self.graph.to(device), y.to(device))
        return self._placed[key]

    def example_graph(self) -> tuple[Tensor | None, Graphs]:
        return self.nodes.x, self.graph

    def facts(self) -> dict[str, Any]:
        return self.describe(self.nodes.features, self.nodes.names).to_data()

    def build(self, facts: Mapping[str, Any] | None = None) -> IGNN:
        model = super().build(facts)
        model.project_(self.least_rho)
        return model

    @property
    def steps_per_epoch(self) -> int:
        return 1

    def train_batch(self, step: int, seed: int, shard: Shard = WHOLE) -> Tensor:
        train = self.nodes.train
        if shard.world > len(train):
            raise ZooError(
                f"{len(train)} training nodes cannot be divided among {shard.world} processes"
            )
        return train[shard.rank :: shard.world]

    def loss(self, model: Any, batch: Tensor, carry: Any) -> Loss:
        x, graph, y = self.on(batch.device, next(model.parameters()).dtype)
        out: GraphOutput[Tensor] = model(x, graph, carry if self.warm else None)
        value = node_loss(out.prediction[batch], y[batch])
        return Loss(value, stats=out.stats, carry=out.state if self.warm else None)

    def split_carry(self, carries: Sequence[Any], shard: Shard) -> Any:
        """Return the states of the graph, which every process has computed as a whole."""
        return carries[0]

    def evaluate(self, model: Any, split: Split, thorough: bool = False) -> Evaluation:
        record = SolverRecord()
        x, graph, y = self.on(model.device, model.dtype)
        out: GraphOutput[Tensor] = model(x, graph, sradius_mode=thorough)
        record.add(out.stats)
        rows = (self.nodes.test if split == "test" else self.nodes.val).to(model.device)
        return Evaluation(self.metrics(out.prediction[rows], y[rows]), record)


@dataclass(frozen=True)
class NodeTask(WholeTask):
    """Classes of nodes: chains, citations, co-purchases. Further options: see `WholeTask`.

    Args:
        data: which set.
        length: nodes in a chain.
    """

    score: ClassVar[Score] = Score("accuracy", "%")

    data: Literal["chains", "cora", "citeseer", "pubmed", "photo"] = "chains"
    length: int = 10

    @property
    def reads_data_dir(self) -> bool:
        return self.data != "chains"

    @cached_property
    def nodes(self) -> NodeSet:
        if self.download:
            download(self.data_dir, self.data)
        if self.data == "chains":
            return chains(self.length)
        if self.data == "photo":
            return readers.amazon_photo(self.data_dir, self.split_seed)
        return readers.planetoid(self.data_dir, self.data)

    def describe(self, features: int, classes: tuple[str, ...]) -> GraphFacts:
        real = self.data != "chains"
        return GraphFacts(
            features=features, classes=classes, undirected=real, rho=self.least_rho, unit_rows=real
        )

    def metrics(self, logits: Tensor, y: Tensor) -> dict[str, float]:
        return {"accuracy": accuracy(logits, y)}

    @torch.no_grad()
    def pictures(self, model: Any) -> list[Picture]:
        from deq_zoo.ignn.pictures import chain_map, state_map

        x, graph, y = self.on(model.device, model.dtype)
        out: GraphOutput[Tensor] = model(x, graph)
        if self.data == "chains":
            right = out.prediction.float().softmax(1).gather(1, y[:, None]).view(-1, self.length)
            classes = y[:: self.length].cpu()
            return [chain_map(right.cpu(), classes, self.nodes.names, len(self.train_set))]
        rows = self.test_set.to(model.device)
        states = out.state[0][rows].float().cpu()
        what = f"The equilibrium states of all {len(rows)} test nodes"
        return state_map(states, y[rows].cpu(), self.nodes.names, what)


@dataclass(frozen=True)
class NodeLabelTask(WholeTask):
    """Several labels for each node; evaluation gives the number of labels of each node.

    Further options: see `WholeTask`.

    Args:
        data: which set.
        portion: of Amazon's nodes to train on, as in its file names.
    """

    score: ClassVar[Score] = Score("micro_f1", "%")

    data: Literal["amazon"] = "amazon"
    portion: str = "0.06"

    @cached_property
    def nodes(self) -> NodeSet:
        if self.download:
            download(self.data_dir, self.data)
        return readers.amazon(self.data_dir, self.portion, self.split_seed)

    def describe(self, features: int, classes: tuple[str, ...]) -> GraphFacts:
        return GraphFacts(
            features=features, classes=classes, multilabel=True, rho=self.least_rho, identity=True
        )

    def metrics(self, logits: Tensor, y: Tensor) -> dict[str, float]:
        return f1_scores(oracle_labels(logits, y), y)

    @torch.no_grad()
    def pictures(self, model: Any) -> list[Picture]:
        from deq_zoo.ignn.pictures import label_scores

        x, graph, y = self.on(model.device, model.dtype)
        rows = self.test_set.to(model.device)
        marked = oracle_labels(model(x, graph).prediction[rows], y[rows])
        rule = "of each node as many labels as it has are predicted, the likeliest ones"
        what = f"all {len(rows)} test nodes; {rule}"
        return label_scores(marked.cpu(), y[rows].cpu(), what)
