"""The networks of the paper's IGNN: nodes with skips, nodes with one layer, whole graphs.

Attribute names are those of the published checkpoints.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch.nn.functional as F
from torch import Tensor, nn

from deq_zoo.checks import check_fields
from deq_zoo.errors import DataError
from deq_zoo.ignn.facts import GraphFacts
from deq_zoo.ignn.graph import as_graphs
from deq_zoo.ignn.inputs import GraphLike, prepare, read_graph
from deq_zoo.ignn.layers import ImplicitGraph, Init, Start
from deq_zoo.ignn.prediction import Classes, LabelSets
from deq_zoo.model import Model
from deq_zoo.output import Output
from torchdeq import DEQConfig, SolverStat

P = TypeVar("P")
States = list[Tensor]


@dataclass(frozen=True, kw_only=True)
class IGNNConfig:
    """The shape of an IGNN.

    Args:
        width: hidden features h.
        kappa: of every layer; None for no projection.
        dropout: before the last linear map; a network with skips has none.
        unit: whether a node classifier scales states to length 1 before the last linear map.
        start: where the solver starts: `injection` or `zeros`.
        init: of W in every layer.
    """

    width: int = 16
    kappa: float | None = 0.9
    dropout: float = 0.5
    unit: bool = False
    start: Start = "injection"
    init: Init = "uniform"

    def __post_init__(self) -> None:
        check_fields(self, 1, "width")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must lie in [0, 1), got {self.dropout}")


@dataclass(frozen=True)
class GraphOutput(Output[P, States], Generic[P]):
    """The output of a network of implicit graph layers.

    Args:
        predictions: one: logits (N, classes) or, for whole graphs, (G, classes); from `predict`,
            `Classes` or `LabelSets`.
        state: (N, width) of each implicit layer, without a graph.
        stats: of the layer whose solve took most evaluations.
        layer_stats: of each layer's solve; one sample per graph.
    """

    layer_stats: tuple[SolverStat, ...] = ()

    @classmethod
    def collect(cls, logits: P, states: States, stats: Sequence[SolverStat]) -> GraphOutput[P]:
        """Return the output for logits and for what each layer returned."""
        # In a graph of `torchdeq.export` the evaluations are not known yet.
        known = all(isinstance(each.nfe, int) for each in stats)
        hardest = max(stats, key=lambda each: each.nfe) if known else stats[0]
        return cls([logits], [z.detach() for z in states], hardest, tuple(stats))


class IGNN(Model):
    """The common part of the networks: implicit layers, one after the other.

    Args:
        features: of each node.
        classes: outputs.
        config: the shape.
        deq: options of the DEQ and the norm of each layer: a `DEQConfig`, dict or Namespace.
    """

    #: The first and the last weight, whose shapes give features and classes.
    ends: ClassVar[tuple[str, str]]
    #: What a row of the output belongs to.
    unit: ClassVar[Literal["node", "graph"]] = "node"

    def __init__(self, features: int, classes: int, config: IGNNConfig, deq: Any = None) -> None:
        super().__init__()
        if features < 1 or classes < 1:
            raise ValueError(f"needs features and classes, got {features} and {classes}")
        self.config, self.options = config, DEQConfig(deq)
        several = self.options.n_states > 1 or self.options.indexing
        if several or self.options.sup_loc or self.options.sup_gap > 0:
            raise ValueError(
                "a network of implicit graph layers passes one state on: drop n_states, indexing, "
                "sup_gap and sup_loc, or use ImplicitGraph itself"
            )

    @abstractmethod
    def forward(
        self, x: Tensor | None, graph: Any, z0: Sequence[Tensor] | None = None, **call: Any
    ) -> GraphOutput[Tensor]:
        """Return logits.

        Args:
            x: (N, features) of the nodes; None stands for the identity matrix.
            graph: `Graphs`, a sparse adjacency or PyG's data; see `as_graphs`.
            z0: a state of each layer to start from, e.g. `state` of an earlier output.
            **call: options of this call of the DEQ, e.g. `f_max_iter=300`.
        """

    def predict(
        self, x: GraphLike, z0: Sequence[Tensor] | None = None, **call: Any
    ) -> GraphOutput[Classes | LabelSets]:
        """Return the classes of a graph, or of its nodes, by name and with probabilities.

        The graph is brought into the form of the training graphs: normalised, with edges both ways
        and with rows of features divided by their sums where training did so.

        Args:
            x: the path of an `.npz` file, a dict, a pair `(edge_index, x)`, or PyG's `Data` or
                `Batch`. Names are `edge_index` (2, E), `x` (N, features) and, if needed,
                `edge_weight` (E,) and `batch` (N,) or `ptr` (G + 1,), which separate graphs.
            z0: a state of each layer to start from, for a graph with the same nodes.
            **call: options of this call of the DEQ.
        """
        out = super().predict(x, z0, **call)
        assert isinstance(out, GraphOutput)
        return out

    def _predict(
        self, x: GraphLike, z0: Sequence[Tensor] | None, **call: Any
    ) -> GraphOutput[Classes | LabelSets]:
        facts = GraphFacts.from_data(self.facts)
        try:
            features, graph = prepare(read_graph(x), facts)
        except (ValueError, TypeError) as error:
            if isinstance(x, (str, Path)):
                raise DataError(f"{x}: {error}") from None
            raise
        if features is not None:
            features = features.to(self.device, next(self.parameters()).dtype)
        out = self(features, graph.to(self.device), z0, **call)
        logits = out.prediction.float().cpu()
        if facts.multilabel:
            labels = LabelSets(self.unit, facts.classes, logits.sigmoid())
            return GraphOutput([labels], out.state, out.stats, out.layer_stats)
        classes = Classes(self.unit, facts.classes, logits.softmax(1))
        return GraphOutput([classes], out.state, out.stats, out.layer_stats)

    def layer(self, features: int, width: int, self_term: bool = True) -> ImplicitGraph:
        """Return an implicit layer with the network's options."""
        c = self.config
        return ImplicitGraph(
            features, width, kappa=c.kappa, self_term=self_term, start=c.start, init=c.init,
            deq=self.options,
        )  # fmt: skip

    def implicit(self) -> Iterator[ImplicitGraph]:
        """Yield the implicit layers."""
        return (module for module in self.modules() if isinstance(module, ImplicitGraph))

    def project_(self, rho: float) -> None:
        """Project the parameters of every layer; see `ImplicitGraph.project_`."""
        for layer in self.implicit():
            layer.project_(rho)


class SkipIGNN(IGNN):
    r"""Five implicit layers with linear skips: every node gets logits; the net for PPI.

    $$x \leftarrow \mathrm{ELU}(Z^\star_l(x) + S_l x + s_l)$$

    without the ELU at the end; widths 4h, 2h, 2h, h, classes. Args: see `IGNN`.
    """

    ends = ("ignn.0.Omega_1", "proj.4.weight")

    def __init__(self, features: int, classes: int, config: IGNNConfig, deq: Any = None) -> None:
        super().__init__(features, classes, config, deq)
        h = config.width
        widths = (features, 4 * h, 2 * h, 2 * h, h, classes)
        self.ignn = nn.ModuleList(self.layer(p, m) for p, m in pairwise(widths))
        self.proj = nn.ModuleList(nn.Linear(p, m) for p, m in pairwise(widths))

    def forward(
        self, x: Tensor | None, graph: Any, z0: Sequence[Tensor] | None = None, **call: Any
    ) -> GraphOutput[Tensor]:
        """Return logits (N, classes); see `IGNN.forward`. Features must be given."""
        if x is None:
            raise ValueError("a network with skips needs features x, (N, features): got None")
        graph = as_graphs(graph)
        states, stats = [], []
        for k, (layer, skip) in enumerate(zip(self.ignn, self.proj, strict=True)):
            (z,), stat = layer(x, graph, z0[k] if z0 else None, **call)
            x = z + skip(x)
            x = x if k == len(self.ignn) - 1 else F.elu(x)
            states.append(z)
            stats.append(stat)
        return GraphOutput.collect(x, states, stats)


class NodeIGNN(IGNN):
    r"""One implicit layer and a linear map: the net for chains, citations and co-purchases.

    $$y = V \, \mathrm{dropout}(Z^\star)$$

    with every row of $Z^\star$ scaled to length 1 if the config says `unit`. Args: see `IGNN`.
    """

    ends = ("ig1.Omega_1", "V.weight")

    def __init__(self, features: int, classes: int, config: IGNNConfig, deq: Any = None) -> None:
        super().__init__(features, classes, config, deq)
        self.ig1 = self.layer(features, config.width)
        self.V = nn.Linear(config.width, classes, bias=False)

    def forward(
        self, x: Tensor | None, graph: Any, z0: Sequence[Tensor] | None = None, **call: Any
    ) -> GraphOutput[Tensor]:
        """Return logits (N, classes); see `IGNN.forward`."""
        (z,), stats = self.ig1(x, graph, z0[0] if z0 else None, **call)
        h = F.normalize(z, dim=1) if self.config.unit else z
        logits: Tensor = self.V(F.dropout(h, self.config.dropout, self.training))
        return GraphOutput.collect(logits, [z], [stats])


class GraphIGNN(IGNN):
    r"""Three implicit layers, a sum over nodes, two linear maps: it classifies whole graphs.

    $$y = V_1 \, \mathrm{dropout}(\mathrm{ReLU}(V_0 \textstyle\sum_i Z^\star_i + b_0)) + b_1$$

    The layers have no self term. Args: see `IGNN`.
    """

    ends = ("ig1.Omega_1", "V_1.weight")
    unit = "graph"

    def __init__(self, features: int, classes: int, config: IGNNConfig, deq: Any = None) -> None:
        super().__init__(features, classes, config, deq)
        h = config.width
        self.ig1 = self.layer(features, h, self_term=False)
        self.ig2 = self.layer(h, h, self_term=False)
        self.ig3 = self.layer(h, h, self_term=False)
        self.V_0 = nn.Linear(h, h)
        self.V_1 = nn.Linear(h, classes)

    def forward(
        self, x: Tensor | None, graph: Any, z0: Sequence[Tensor] | None = None, **call: Any
    ) -> GraphOutput[Tensor]:
        """Return logits (G, classes); see `IGNN.forward`."""
        graph = as_graphs(graph)
        states, stats = [], []
        z = x
        for k, layer in enumerate((self.ig1, self.ig2, self.ig3)):
            (z,), stat = layer(z, graph, z0[k] if z0 else None, **call)
            states.append(z)
            stats.append(stat)
        hidden = self.V_0(graph.pool(states[-1])).relu()
        logits: Tensor = self.V_1(F.dropout(hidden, self.config.dropout, self.training))
        return GraphOutput.collect(logits, states, stats)
