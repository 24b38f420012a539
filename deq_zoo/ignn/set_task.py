"""Tasks on many graphs: labels of the nodes of new ones, and classes of whole graphs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from deq_zoo.errors import ZooError
from deq_zoo.ignn import readers
from deq_zoo.ignn.data import GraphSet, random_graphs
from deq_zoo.ignn.download import download
from deq_zoo.ignn.graph import Graphs
from deq_zoo.ignn.metrics import f1_scores
from deq_zoo.ignn.model import GraphIGNN, IGNNConfig, Output, SkipIGNN
from deq_zoo.ignn.task import PLAIN, IGNNTask, hardest, node_loss
from deq_zoo.metrics import accuracy
from deq_zoo.record import SolverRecord
from deq_zoo.task import (
    WHOLE,
    Evaluation,
    Loss,
    Picture,
    Score,
    Shard,
    batch_indices,
    steps_in_epoch,
)
from torchdeq import DEQConfig


class Part(NamedTuple):
    """Graphs that are solved together, with features and labels.

    Args:
        x: features of their nodes.
        graph: side by side.
        y: labels of their nodes, or their classes.
        weight: of their loss among the processes of a run: how many graphs they count for.
    """

    x: Tensor
    graph: Graphs
    y: Tensor
    weight: int


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
        """The data, split."""

    @property
    @abstractmethod
    def graphs(self) -> list[Graphs]:
        """The adjacency of each of its graphs."""

    @property
    def least_rho(self) -> float:
        return min(float(self.graphs[k].rho.min()) for k in self.examples.train)

    @property
    def steps_per_epoch(self) -> int:
        return steps_in_epoch(len(self.examples.train), self.batch)

    def train_batch(self, step: int, seed: int, shard: Shard = WHOLE) -> list[Part]:
        if shard.world > self.batch:
            raise ZooError(
                f"batch={self.batch} cannot be divided among {shard.world} processes: set "
                f"task.batch to {shard.world} or more"
            )
        train = self.examples.train
        rows = batch_indices(len(train), self.batch, step, seed, shard)
        if len(rows):
            return self.collate([train[k] for k in rows.tolist()])
        # The last batch has too few graphs: gradients are exchanged all the same, of nothing.
        return [self.join(train[:1])._replace(weight=0)]

    def collate(self, chosen: Sequence[int]) -> list[Part]:
        """Graphs in parts of similar sizes: padded to the largest of all, most would be padding."""
        sizes, parts = self.examples.sizes, list[list[int]]()
        for k in sorted(chosen, key=lambda k: sizes[k]):
            if parts and sizes[k] <= 2 * sizes[parts[-1][0]]:
                parts[-1].append(k)
            else:
                parts.append([k])
        return [self.join(part) for part in parts]

    def join(self, chosen: Sequence[int]) -> Part:
        """Graphs side by side."""
        rows = self.examples.rows()
        x = torch.cat([self.examples.x[rows[k]] for k in chosen])
        if self.examples.y.dim() == 2:
            y = torch.cat([self.examples.y[rows[k]] for k in chosen])
        else:
            y = self.examples.y[list(chosen)]
        return Part(x, Graphs.union([self.graphs[k] for k in chosen]), y, len(chosen))

    def samples(self, batch: list[Part]) -> int:
        return sum(part.weight for part in batch)

    def loss(self, model: nn.Module, batch: list[Part], carry: Any) -> Loss:
        outs: list[Output] = [model(part.x, part.graph) for part in batch]
        y = torch.cat([part.y for part in batch])
        value = node_loss(torch.cat([out.logits for out in outs]), y)
        return Loss(value, stats=hardest([stats for out in outs for stats in out.stats]))

    def predict_split(
        self, model: nn.Module, split: str, device: torch.device, record: SolverRecord, **call: Any
    ) -> tuple[Tensor, Tensor]:
        """Logits and labels of all graphs of a split."""
        chosen = getattr(self.examples, split)
        logits, labels = [], []
        for k in range(0, len(chosen), self.batch):
            for part in self.collate(chosen[k : k + self.batch]):
                out: Output = model(part.x.to(device), part.graph.to(device), **call)
                for stats in out.stats:
                    record.add(stats)
                logits.append(out.logits)
                labels.append(part.y.to(device))
        return torch.cat(logits), torch.cat(labels)

    def evaluate(self, model: nn.Module, device: torch.device, thorough: bool) -> Evaluation:
        record = SolverRecord()
        metrics: dict[str, float] = {}
        for split in ("val", "test"):
            found = self.predict_split(model, split, device, record, sradius_mode=thorough)
            metrics |= self.judge(split, *found)
        return Evaluation(metrics, record)


@dataclass(frozen=True)
class TissueTask(SetTask):
    """Labels of proteins in tissues that training has not seen.

    Args:
        deq: options of the equilibrium.
        net: the shape of the network.
        batch: graphs.
        data_dir: folder of the set's files.
        download: whether PyG may fetch them into that folder.
    """

    score: ClassVar[Score] = Score("val_micro_f1", "%")

    @cached_property
    def examples(self) -> GraphSet:
        """The data."""
        if self.download:
            download(self.data_dir, "ppi")
        return readers.ppi(self.data_dir)

    @cached_property
    def graphs(self) -> list[Graphs]:
        """Adjacencies as they are: no weights, no self-loops."""
        return self.examples.graphs(normalise=False)

    def build(self) -> nn.Module:
        return SkipIGNN(self.examples.features, self.examples.classes, self.net, self.options)

    def judge(self, split: str, logits: Tensor, y: Tensor) -> dict[str, float]:
        return f1_scores(split, logits > 0, y)

    @torch.no_grad()
    def pictures(self, model: nn.Module, device: torch.device) -> list[Picture]:
        from deq_zoo.ignn.pictures import label_scores

        logits, y = self.predict_split(model, "test", device, SolverRecord())
        return [label_scores(logits.cpu() > 0, y.cpu())]


@dataclass(frozen=True)
class GraphClassTask(SetTask):
    """Classes of whole graphs: sets of TU Dortmund, or rings and stars.

    Args:
        deq: options of the equilibrium.
        net: the shape of the network.
        batch: graphs.
        data: the set's name, e.g. `MUTAG`; `rings` is made by rule.
        folds: parts the set is divided into.
        fold: the one to judge by; the next is the one to choose by.
        split_seed: decides the parts.
        data_dir: folder of the set's files.
        download: whether PyG may fetch them into that folder.
    """

    score: ClassVar[Score] = Score("val_accuracy", "%")

    batch: int = 128
    data: str = "MUTAG"
    folds: int = 10
    fold: int = 0
    split_seed: int = 42

    @cached_property
    def examples(self) -> GraphSet:
        """The data, split."""
        if self.download:
            download(self.data_dir, self.data)
        rings = self.data == "rings"
        found = random_graphs() if rings else readers.tu(self.data_dir, self.data)
        return found.split(self.folds, self.fold, self.split_seed)

    @cached_property
    def graphs(self) -> list[Graphs]:
        """Normalised adjacencies with self-loops; edges go both ways, so the Perron root is 1."""
        return self.examples.graphs(normalise=True, rho=1.0)

    def build(self) -> nn.Module:
        model = GraphIGNN(self.examples.features, self.examples.classes, self.net, self.options)
        model.project_(1.0)
        return model

    def judge(self, split: str, logits: Tensor, y: Tensor) -> dict[str, float]:
        return {f"{split}_accuracy": accuracy(logits, y)}

    @torch.no_grad()
    def pictures(self, model: nn.Module, device: torch.device) -> list[Picture]:
        from deq_zoo.ignn.pictures import molecules, state_map

        chosen = [*self.examples.val, *self.examples.test]
        x, graph, y, _ = self.join(chosen)
        out: Output = model(x.to(device), graph.to(device))
        pooled = graph.pool(out.states[-1].cpu())
        right = out.logits.softmax(1).cpu().gather(1, y[:, None]).flatten()
        rows = self.examples.rows()
        kinds = [self.examples.x[rows[k]].argmax(1) for k in chosen[:12]]
        shown = [self.graphs[k] for k in chosen[:12]]
        return [state_map(pooled, y, "graph"), molecules(shown, kinds, right[:12], y[:12])]
