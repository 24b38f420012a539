"""The common part of all tasks on graphs: options, facts, networks, conversion, predictions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from deq_zoo.exportable import Exportable
from deq_zoo.ignn.convert import from_authors, read_sizes, to_authors
from deq_zoo.ignn.exporting import GraphFile, make_export
from deq_zoo.ignn.facts import GraphFacts, numbered
from deq_zoo.ignn.graph import Graphs
from deq_zoo.ignn.inputs import prepare, read_graph
from deq_zoo.ignn.model import IGNN, IGNNConfig
from deq_zoo.ignn.prediction import doubts
from deq_zoo.output import solve_data
from deq_zoo.predictions import Failure, OutFolder, Prediction, predict_each
from deq_zoo.task import Converted, Task, Weights
from deq_zoo.uses import GRADIENT, SOLVE
from torchdeq import DEQConfig

PLAIN = {"norm_type": "none"}  # options of a DEQ without a norm


class IGNNTask(Task):
    """A task on graphs."""

    shardwise: ClassVar[bool] = True  # a projection is row by row
    network: ClassVar[type[IGNN]]
    net: IGNNConfig
    deq: DEQConfig

    @property
    def uses(self) -> frozenset[str]:
        """Return the options of one state per solve, and those of the norm that is applied.

        There is no regularisation of the Jacobian.
        """
        return SOLVE | GRADIENT | _norm_options(self.deq)

    @property
    def options(self) -> DEQConfig:
        """Return the DEQ's options with the norm, which a layer applies only if it is given."""
        return self.deq.with_options(norm_type=self.deq.norm_type)

    @property
    @abstractmethod
    def least_rho(self) -> float:
        """Return the smallest Perron root of the training graphs."""

    @abstractmethod
    def describe(self, features: int, classes: tuple[str, ...]) -> GraphFacts:
        """Return the form of the data, of which the sizes are given: no file is opened."""

    @abstractmethod
    def metrics(self, logits: Tensor, y: Tensor) -> dict[str, float]:
        """Return the metrics of logits, the score among them."""

    def class_names(self, count: int) -> tuple[str, ...]:
        """Return the names of so many classes, for weights that come without names."""
        return numbered(count)

    def build(self, facts: Mapping[str, Any] | None = None) -> IGNN:
        form = GraphFacts.from_data(self.facts() if facts is None else facts)
        return self.network(form.features, len(form.classes), self.net, self.options)

    def after_step(self, model: Any) -> None:
        model.project_(self.least_rho)

    def from_authors(self, state: Weights) -> Converted:
        features, classes = read_sizes(state, self.network.ends)
        facts = self.describe(features, self.class_names(classes)).to_data()
        return Converted(from_authors(self.build(facts), state), facts)

    def to_authors(self, state: Weights) -> dict[str, Tensor]:
        return to_authors(state)

    @abstractmethod
    def example_graph(self) -> tuple[Tensor | None, Graphs]:
        """Return features and adjacency of the graph that an export takes by default."""

    def exporting(self) -> GraphFile:
        return GraphFile()

    def export(self, model: Any, options: GraphFile) -> Exportable:
        if options.graph:
            x, graph = prepare(read_graph(options.graph), GraphFacts.from_data(model.facts))
        else:
            x, graph = self.example_graph()
        return make_export(model, x, graph, model.facts)

    def predict(
        self, model: Any, paths: Sequence[Path], out: OutFolder
    ) -> Iterator[Prediction | Failure]:
        """Yield the classes of graphs in `.npz` files; see `IGNN.predict` for their arrays.

        A folder that the user asked for gets a table of every row's classes for each file.
        """
        if out.asked:
            out.check(_table(path) for path in paths)

        def classify(path: Path) -> Prediction:
            answer = model.predict(path)
            labels, notes = answer.prediction, [f"{answer.stats.nfe} evaluations"]
            if doubt := doubts(answer.layer_stats, model.options.f_stop):
                notes.append(doubt)
            text = f"{path}: {labels.summary()} ({'; '.join(notes)})"
            files = (out.write(_table(path), labels.to_csv()),) if out.asked else ()
            return Prediction(str(path), text, labels.to_data() | solve_data(answer.stats), files)

        return predict_each(paths, classify)


def node_loss(logits: Tensor, y: Tensor) -> Tensor:
    """Return the cross-entropy of classes, or that of every label on its own."""
    if y.dim() == 2:
        return F.binary_cross_entropy_with_logits(logits, y.to(logits.dtype))
    return F.cross_entropy(logits, y)


def _norm_options(deq: DEQConfig) -> frozenset[str]:
    """Return the options that have an effect with the norm that is chosen."""
    names = {"norm_type"}
    if deq.norm_type == "none":
        return frozenset(names)
    names |= {"norm_no_scale", "norm_clip"}
    if deq.norm_clip:
        names |= {"norm_clip_value"}
    if deq.norm_type == "spectral_norm":
        names |= {"sn_n_power_iters"}
    if deq.norm_no_scale or deq.norm_type == "spectral_norm":  # there the scale starts at it
        names |= {"norm_target_norm"}
    return frozenset(names)


def _table(path: Path) -> str:
    return f"{path.stem}-classes.csv"
