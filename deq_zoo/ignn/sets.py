"""The common part of tasks on many graphs: batches of them, the loss, the evaluation."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deq_zoo.errors import ZooError
from deq_zoo.ignn.base import PLAIN, IGNNTask, node_loss
from deq_zoo.ignn.data import GraphSet
from deq_zoo.ignn.graph import Graphs
from deq_zoo.ignn.model import GraphOutput, IGNNConfig
from deq_zoo.record import SolverRecord
from deq_zoo.task import WHOLE, Evaluation, Loss, Shard, Split, batch_indices, steps_in_epoch
from torchdeq import DEQConfig


class Part(NamedTuple):
    """Graphs that are solved together, with features and labels.

    Args:
        x: features of their nodes.
        graph: the graphs side by side.
        y: labels of their nodes, or their classes.
        terms: rows of `y` that count in the loss; 0 in a part that stands in for no graph.
    """

    x: Tensor
    graph: Graphs
    y: Tensor
    terms: int


@dataclass(frozen=True)
class SetTask(IGNNTask):
    """Batches of graphs out of many."""

    deq: DEQConfig = field(default_factory=lambda: DEQConfig(PLAIN))
    net: IGNNConfig = field(default_factory=IGNNConfig)
    batch: int = 1
    data_dir: str | None = None
    download: bool = False

    @property
    @abstractmethod
    def examples(self) -> GraphSet:
        """Return the graphs with their labels and splits."""

    @property
    @abstractmethod
    def graphs(self) -> list[Graphs]:
        """Return the adjacency of each graph."""

    @property
    def train_set(self) -> tuple[int, ...]:
        """Return the numbers of the training graphs."""
        return self.examples.train

    @property
    def val_set(self) -> tuple[int, ...] | None:
        """Return the numbers of the validation graphs."""
        return self.examples.val or None

    @property
    def test_set(self) -> tuple[int, ...]:
        """Return the numbers of the test graphs."""
        return self.examples.test

    def facts(self) -> dict[str, Any]:
        return self.describe(self.examples.features, self.examples.names).to_data()

    @property
    def steps_per_epoch(self) -> int:
        return steps_in_epoch(len(self.train_set), self.batch)

    def train_batch(self, step: int, seed: int, shard: Shard = WHOLE) -> list[Part]:
        if shard.world > self.batch:
            raise ZooError(
                f"batch={self.batch} cannot be divided among {shard.world} processes: set "
                f"task.batch to {shard.world} or more"
            )
        train = self.train_set
        rows = batch_indices(len(train), self.batch, step, seed, shard)
        if len(rows):
            return self.collate([train[k] for k in rows.tolist()])
        # The last batch has too few graphs for every process, and each must exchange gradients:
        # those of this part count nothing.
        return [self.join(train[:1])._replace(terms=0)]

    def collate(self, chosen: Sequence[int]) -> list[Part]:
        """Return graphs in parts of similar sizes: in one part, most would be padding."""
        sizes, parts = self.examples.sizes, list[list[int]]()
        for k in sorted(chosen, key=lambda k: sizes[k]):
            if parts and sizes[k] <= 2 * sizes[parts[-1][0]]:
                parts[-1].append(k)
            else:
                parts.append([k])
        return [self.join(part) for part in parts]

    def join(self, chosen: Sequence[int]) -> Part:
        """Return graphs side by side."""
        rows = self.examples.rows()
        x = torch.cat([self.examples.x[rows[k]] for k in chosen])
        if self.examples.y.dim() == 2:
            y = torch.cat([self.examples.y[rows[k]] for k in chosen])
        else:
            y = self.examples.y[list(chosen)]
        return Part(x, Graphs.union([self.graphs[k] for k in chosen]), y, len(y))

    def example_graph(self) -> tuple[Tensor | None, Graphs]:
        part = self.join(self.test_set[:1])
        return part.x, part.graph

    def batch_size(self, batch: list[Part]) -> int:
        return sum(part.terms for part in batch)

    def loss(self, model: Any, batch: list[Part], carry: Any) -> Loss:
        outs: list[GraphOutput[Tensor]] = [model(part.x, part.graph) for part in batch]
        y = torch.cat([part.y for part in batch])
        value = node_loss(torch.cat([out.prediction for out in outs]), y)
        solves = [out.stats for out in outs if out.stats is not None]
        return Loss(value, stats=max(solves, key=lambda stats: stats.nfe, default=None))

    def evaluate(self, model: Any, split: Split, thorough: bool = False) -> Evaluation:
        record = SolverRecord()
        logits, y = self.compute_logits(model, split, record, sradius_mode=thorough)
        return Evaluation(self.metrics(logits, y), record)

    def compute_logits(
        self, model: Any, split: Split, record: SolverRecord, **call: Any
    ) -> tuple[Tensor, Tensor]:
        """Return logits and labels of all graphs of a split.

        Args:
            model: the network.
            split: `val` or `test`.
            record: gets the statistics of all layers' solves.
            **call: options of the DEQ.
        """
        chosen = self.test_set if split == "test" else self.examples.val
        logits, labels = [], []
        for k in range(0, len(chosen), self.batch):
            for part in self.collate(chosen[k : k + self.batch]):
                x, graph = model.place(part.x), part.graph.to(model.device)
                out: GraphOutput[Tensor] = model(x, graph, **call)
                for stats in out.layer_stats:
                    record.add(stats)
                logits.append(out.prediction)
                labels.append(part.y.to(model.device))
        return torch.cat(logits), torch.cat(labels)
