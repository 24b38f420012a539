"""Tasks on many graphs: labels of the nodes of new ones, and classes of whole graphs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from deq_zoo.errors import DataError, MissingPackage
from deq_zoo.ignn import readers
from deq_zoo.ignn.data import GraphSet, random_graphs
from deq_zoo.ignn.download import download
from deq_zoo.ignn.facts import GraphFacts, numbered
from deq_zoo.ignn.graph import Graphs
from deq_zoo.ignn.metrics import f1_scores
from deq_zoo.ignn.model import IGNN, GraphIGNN, GraphOutput, SkipIGNN
from deq_zoo.ignn.sets import SetTask
from deq_zoo.metrics import accuracy
from deq_zoo.record import SolverRecord
from deq_zoo.task import Picture, Score, generator

_DRAWN = 12  # graphs in the report


@dataclass(frozen=True)
class TissueTask(SetTask):
    """Labels of proteins in tissues that training has not seen.

    Args:
        deq: options of the equilibrium.
        net: the shape of the network.
        batch: graphs in a batch.
        data_dir: folder of the set's files.
        download: whether PyG may download them into that folder.
    """

    network = SkipIGNN
    score: ClassVar[Score] = Score("micro_f1", "%")

    @cached_property
    def examples(self) -> GraphSet:
        if self.download:
            download(self.data_dir, "ppi")
        return readers.ppi(self.data_dir)

    @cached_property
    def graphs(self) -> list[Graphs]:
        """Return the adjacencies without weights and loops."""
        return self.examples.graphs(normalise=False)

    @cached_property
    def least_rho(self) -> float:
        return min(float(self.graphs[k].rho.min()) for k in self.train_set)

    def describe(self, features: int, classes: tuple[str, ...]) -> GraphFacts:
        return GraphFacts(features=features, classes=classes, multilabel=True, normalised=False)

    def metrics(self, logits: Tensor, y: Tensor) -> dict[str, float]:
        return f1_scores(logits > 0, y)

    @torch.no_grad()
    def pictures(self, model: Any) -> list[Picture]:
        from deq_zoo.ignn.pictures import label_scores

        logits, y = self.compute_logits(model, "test", SolverRecord())
        what = (
            f"all {len(y)} nodes of the {len(self.test_set)} test graphs; labels more likely than "
            "not are predicted"
        )
        return label_scores(logits.cpu() > 0, y.cpu(), what)


@dataclass(frozen=True)
class GraphClassTask(SetTask):
    """Classes of whole graphs: sets of TU Dortmund, or rings and stars.

    Args:
        deq: options of the equilibrium.
        net: the shape of the network.
        batch: graphs in a batch.
        data_dir: folder of the set's files.
        download: whether PyG may download them into that folder.
        data: the set's name, e.g. `MUTAG`; `rings` is made by rule.
        folds: parts the set is divided into.
        fold: the part for the test; the next one is for validation.
        split_seed: decides the parts.
    """

    network = GraphIGNN
    least_rho = 1.0  # of every normalised adjacency whose edges go both ways
    score: ClassVar[Score] = Score("accuracy", "%")

    batch: int = 128
    data: str = "MUTAG"
    folds: int = 10
    fold: int = 0
    split_seed: int = 42

    @property
    def reads_data_dir(self) -> bool:
        return self.data != "rings"

    @cached_property
    def examples(self) -> GraphSet:
        if self.download:
            download(self.data_dir, self.data)
        rings = self.data == "rings"
        graphs = random_graphs() if rings else readers.tu(self.data_dir, self.data)
        return graphs.split(self.folds, self.fold, self.split_seed)

    @cached_property
    def graphs(self) -> list[Graphs]:
        """Return the normalised adjacencies with loops."""
        return self.examples.graphs(normalise=True, rho=self.least_rho)

    def describe(self, features: int, classes: tuple[str, ...]) -> GraphFacts:
        return GraphFacts(features=features, classes=classes, rho=self.least_rho)

    def class_names(self, count: int) -> tuple[str, ...]:
        """Return the names in the data if it is there and has so many, else numbers."""
        try:
            names = self.examples.names
        except (DataError, MissingPackage):
            return numbered(count)
        return names if len(names) == count else numbered(count)

    def build(self, facts: Mapping[str, Any] | None = None) -> IGNN:
        model = super().build(facts)
        model.project_(self.least_rho)
        return model

    def metrics(self, logits: Tensor, y: Tensor) -> dict[str, float]:
        return {"accuracy": accuracy(logits, y)}

    @torch.no_grad()
    def pictures(self, model: Any) -> list[Picture]:
        from deq_zoo.ignn.pictures import drawn_graphs, state_map

        order = torch.randperm(len(self.test_set), generator=generator("pictures")).tolist()
        chosen = [self.test_set[k] for k in order]
        x, graph, y, _ = self.join(chosen)
        out: GraphOutput[Tensor] = model(model.place(x), graph.to(model.device))
        pooled = graph.pool(out.state[-1].float().cpu())
        rows, names = self.examples.rows(), self.examples.names
        kinds = [self.examples.x[rows[k]].argmax(1) for k in chosen[:_DRAWN]]
        shown = [self.graphs[k] for k in chosen[:_DRAWN]]
        chance = out.prediction.float().softmax(1).cpu()
        what = f"States of the last layer, summed over nodes, of all {len(y)} test graphs"
        return [
            *state_map(pooled, y, names, what),
            *drawn_graphs(shown, kinds, chance[:_DRAWN], y[:_DRAWN], names, len(y)),
        ]
