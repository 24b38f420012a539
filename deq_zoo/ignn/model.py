"""The four networks of the paper's IGNN: nodes with skips, nodes with one layer, whole graphs.

Attribute names are those of the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from deq_zoo.checks import check_fields
from deq_zoo.ignn.graph import as_graphs
from deq_zoo.ignn.layers import ImplicitGraph, Init, Start
from torchdeq import DEQConfig, SolverStat


@dataclass(frozen=True, kw_only=True)
class IGNNConfig:
    """The shape of an IGNN.

    Args:
        width: hidden features h.
        kappa: of every layer; None for no projection.
        dropout: before the last linear map; a network with skips has none.
        unit: whether states are scaled to length 1 before it, in a node classifier.
        start: where the solver starts.
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


class Output(NamedTuple):
    """What a network says.

    Args:
        logits: (N, classes) or, for whole graphs, (G, classes).
        states: (N, width) of each implicit layer, to start the next solve from.
        stats: of each layer's solve; one sample per graph.
    """

    logits: Tensor
    states: list[Tensor]
    stats: list[SolverStat]


class _Net(nn.Module):
    """What the networks share: implicit layers, one after the other."""

    def __init__(self, features: int, classes: int, config: IGNNConfig, deq: Any) -> None:
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

    def layer(self, features: int, width: int, self_term: bool = True) -> ImplicitGraph:
        """An implicit layer with the network's options."""
        c = self.config
        return ImplicitGraph(
            features, width, kappa=c.kappa, self_term=self_term, start=c.start, init=c.init,
            deq=self.options,
        )  # fmt: skip

    def implicit(self) -> Iterator[ImplicitGraph]:
        """Its implicit layers."""
        return (module for module in self.modules() if isinstance(module, ImplicitGraph))

    def project_(self, rho: float) -> None:
        """Project the parameters of every layer; see `ImplicitGraph.project_`."""
        for layer in self.implicit():
            layer.project_(rho)


class SkipIGNN(_Net):
    r"""Five implicit layers with linear skips: every node gets logits; the net for PPI.

    $$x \leftarrow \mathrm{ELU}(Z^\star_l(x) + S_l x + s_l)$$

    without the ELU at the end; widths 4h, 2h, 2h, h, classes.

    Args:
        features: of each node.
        classes: outputs.
        config: the shape.
        deq: options of the DEQ and the norm of each layer.
    """

    def __init__(self, features: int, classes: int, config: IGNNConfig, deq: Any = None) -> None:
        super().__init__(features, classes, config, deq)
        h = config.width
        widths = (features, 4 * h, 2 * h, 2 * h, h, classes)
        self.ignn = nn.ModuleList(self.layer(p, m) for p, m in pairwise(widths))
        self.proj = nn.ModuleList(nn.Linear(p, m) for p, m in pairwise(widths))

    def forward(
        self, x: Tensor, graph: Any, z0: Sequence[Tensor] | None = None, **call: Any
    ) -> Output:
        """Logits (N, classes); see `ImplicitGraph.forward`."""
        graph = as_graphs(graph)
        states, stats = [], []
        for k, (layer, skip) in enumerate(zip(self.ignn, self.proj, strict=True)):
            (z,), stat = layer(x, graph, z0[k] if z0 else None, **call)
            x = z + skip(x)
            x = x if k == len(self.ignn) - 1 else F.elu(x)
            states.append(z)
            stats.append(stat)
        return Output(x, states, stats)


class NodeIGNN(_Net):
    r"""One implicit layer and a linear map: the net for chains, citations and co-purchases.

    $$y = V \, \mathrm{dropout}(Z^\star)$$

    with every row of $Z^\star$ scaled to length 1 if the config says `unit`.

    Args: see `SkipIGNN`.
    """

    def __init__(self, features: int, classes: int, config: IGNNConfig, deq: Any = None) -> None:
        super().__init__(features, classes, config, deq)
        self.ig1 = self.layer(features, config.width)
        self.V = nn.Linear(config.width, classes, bias=False)

    def forward(
        self, x: Tensor | None, graph: Any, z0: Sequence[Tensor] | None = None, **call: Any
    ) -> Output:
        """Logits (N, classes); see `ImplicitGraph.forward`."""
        (z,), stats = self.ig1(x, graph, z0[0] if z0 else None, **call)
        h = F.normalize(z, dim=1) if self.config.unit else z
        logits = self.V(F.dropout(h, self.config.dropout, self.training))
        return Output(logits, [z], [stats])


class GraphIGNN(_Net):
    r"""Three implicit layers, a sum over nodes, two linear maps: whole graphs are classified.

    $$y = V_1 \, \mathrm{dropout}(\mathrm{ReLU}(V_0 \textstyle\sum_i Z^\star_i + b_0)) + b_1$$

    The layers have no self term. Args: see `SkipIGNN`.
    """

    def __init__(self, features: int, classes: int, config: IGNNConfig, deq: Any = None) -> None:
        super().__init__(features, classes, config, deq)
        h = config.width
        self.ig1 = self.layer(features, h, self_term=False)
        self.ig2 = self.layer(h, h, self_term=False)
        self.ig3 = self.layer(h, h, self_term=False)
        self.V_0 = nn.Linear(h, h)
        self.V_1 = nn.Linear(h, classes)

    def forward(
        self, x: Tensor, graph: Any, z0: Sequence[Tensor] | None = None, **call: Any
    ) -> Output:
        """Logits (G, classes); see `ImplicitGraph.forward`."""
        graph = as_graphs(graph)
        states, stats = [], []
        for k, layer in enumerate((self.ig1, self.ig2, self.ig3)):
            (x,), stat = layer(x, graph, z0[k] if z0 else None, **call)
            states.append(x)
            stats.append(stat)
        hidden = self.V_0(graph.pool(x)).relu()
        logits = self.V_1(F.dropout(hidden, self.config.dropout, self.training))
        return Output(logits, states, stats)
