"""The implicit graph layer: node states in equilibrium with their neighbours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from deq_zoo.ignn.constraint import WellPosedness, project_rows, projected_through
from deq_zoo.ignn.graph import Graphs, as_graphs
from deq_zoo.ignn.sparse import Both, sparse_weight, times_transposed
from deq_zoo.tree import local
from torchdeq import (
    DEQConfig,
    SolverStat,
    apply_norm,
    get_deq,
    register_norm_module,
    reset_norm,
)

Start = Literal["injection", "zeros"]
Init = Literal["uniform", "identity"]


class ImplicitGraph(nn.Module):
    r"""A graph layer of unbounded depth (Gu et al., 2020).

    $$Z^\star = \varphi(A^\top Z^\star W^\top + B), \qquad
    B = A^\top X \Omega_1^\top + X \Omega_2^\top$$

    Each graph is one sample of the solver, with its own residual, step count and status. With
    `kappa`, rows of W are projected so that $\|W\|_\infty \le \kappa / \rho(|A|)$ for each
    graph, by which the fixed point exists and plain iteration finds it (Perron-Frobenius).
    Gradients pass the projection straight through. A norm, if `deq` names one, comes first; with
    `norm_clip` it is the clipped spectral norm of the paper. Each of the two works alone.

    Shapes: `x` is `(N, in_features)`, states are `(N, out_features)`, over the nodes of all
    graphs in a row.

    Args:
        in_features: columns of X.
        out_features: width of the states.
        kappa: in (0, 1); None leaves W alone.
        self_term: whether $X \Omega_2^\top$ is part of B.
        start: where the solver starts without a `z0`: at B, or at zeros.
        init: of W: `uniform` within $\pm m^{-1/2}$, as published, or `identity`, which
            the projection makes the layer that forgets least on the way along a path.
        phi: applied entry by entry; its slope must lie in [-1, 1].
        deq: options of the DEQ and of the norm: a `DEQConfig`, dict or Namespace. Without a
            `norm_type` nothing is normalised.
    """

    W: Tensor  # parameters, or computed from some by a norm
    Omega_1: Tensor
    Omega_2: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        kappa: float | None = 0.9,
        self_term: bool = True,
        start: Start = "injection",
        init: Init = "uniform",
        phi: Callable[[Tensor], Tensor] = torch.relu,
        deq: Any = None,
    ) -> None:
        super().__init__()
        if kappa is not None and not 0 < kappa < 1:
            raise ValueError(f"kappa must lie in (0, 1), or be None for no projection, got {kappa}")
        if start not in ("injection", "zeros"):
            raise ValueError(f"start must be 'injection' or 'zeros', got {start!r}")
        if init not in ("uniform", "identity"):
            raise ValueError(f"init must be 'uniform' or 'identity', got {init!r}")
        if in_features < 1 or out_features < 1:
            raise ValueError(f"a layer needs features, got {in_features} in, {out_features} out")
        self.in_features, self.out_features = in_features, out_features
        self.kappa, self.start, self.phi = kappa, start, phi
        m, p = out_features, in_features
        self.W = nn.Parameter(torch.empty(m, m))
        self.Omega_1 = nn.Parameter(torch.empty(m, p))
        self.register_parameter("Omega_2", nn.Parameter(torch.empty(m, p)) if self_term else None)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(m**-0.5), m**-0.5)
        if init == "identity":
            nn.init.eye_(self.W)
        options = DEQConfig(deq)
        # A sample is a whole graph; its nodes, which depend on each other, are one state.
        self.deq = get_deq(options, coupled=options.get("coupled", False))
        if options.get("norm_type", "none") != "none":
            apply_norm(self, args=options)

    def forward(
        self, x: Tensor | None, graph: Any, z0: Tensor | None = None, **call: Any
    ) -> tuple[list[Tensor], SolverStat]:
        """Return the states in equilibrium that training samples, or the one of evaluation.

        Args:
            x: features of the nodes; None stands for the identity matrix.
            graph: `Graphs`, a sparse adjacency or PyG's data; see `as_graphs`.
            z0: (N, out_features) where to start, e.g. the states of the epoch before.
            **call: options of this call of the DEQ, e.g. `f_max_iter=300`.
        """
        reset_norm(self)
        graph = self._fitting(graph)
        if call.get("compact") and len(graph.sizes) > 1:
            raise ValueError(
                f"compact=True takes finished graphs out of the solve, but {len(graph.sizes)} "
                "share one adjacency: drop it, or solve them one by one"
            )
        B, W = self.inject(x, graph), self.weight(graph)
        projected = self.kappa is not None  # which leaves few entries of W
        rows = sparse_weight(W) if projected and graph.sparse else None

        def f(z: Tensor) -> Tensor:
            return self.step(z, W, B, graph, rows)

        if z0 is not None and z0.shape != B.shape:
            raise ValueError(
                f"z0 must be {tuple(B.shape)}, a state for each node, got {tuple(z0.shape)}"
            )
        if z0 is None:
            z0 = B.detach() if self.start == "injection" else torch.zeros_like(B)
        dtype = self.Omega_1.dtype  # B's own may be autocast's
        states, stats = self.deq(f, graph.pad(z0.to(dtype)), **call)
        return [graph.gather(z) for z in states], stats

    def inject(self, x: Tensor | None, graph: Graphs) -> Tensor:
        """Return B, (N, out_features)."""
        if x is None:
            if graph.nodes != self.in_features:
                raise ValueError(
                    f"without features a layer has one for each node: built for "
                    f"{self.in_features}, got a graph of {graph.nodes}"
                )
            B = graph.propagate(self.Omega_1.mT)
            return B if self.Omega_2 is None else B + self.Omega_2.mT
        if x.shape != (graph.nodes, self.in_features):
            raise ValueError(
                f"features must be ({graph.nodes}, {self.in_features}), one row for each node, got "
                f"{tuple(x.shape)}"
            )
        if self.in_features < self.out_features:  # the sparse product on the narrower matrix
            B = graph.propagate(x) @ self.Omega_1.mT
        else:
            B = graph.propagate(x @ self.Omega_1.mT)
        return B if self.Omega_2 is None else B + x @ self.Omega_2.mT

    def weight(self, graph: Graphs) -> Tensor:
        """Return W as f uses it: (m, m), or (G, m, m) if Perron roots differ."""
        if self.kappa is None:
            return self.W
        if graph.alike:
            return projected_through(self.W, self.kappa / graph.rho[0])
        return projected_through(self.W, self.kappa / graph.rho[:, None, None])

    def step(
        self, z: Tensor, W: Tensor, B: Tensor, graph: Graphs, rows: Both | None = None
    ) -> Tensor:
        """Return f of padded states (G, n_max, m); padding stays zero."""
        shared = W.dim() == 2
        y = times_transposed(graph.gather(z), W, rows) if shared else graph.gather(z @ W.mT)
        return graph.pad(self.phi(graph.propagate(y) + B))

    @torch.no_grad()
    def project_(self, rho: float) -> None:
        """Project the parameter W itself into the ball of a graph: projected gradient descent.

        Call it after an optimiser's step. With a norm, or without `kappa`, it does nothing. Of a
        sharded W, each process projects its own rows.
        """
        if self.kappa is not None and "W" in self._parameters:
            rows = local(self.W)
            rows.copy_(project_rows(rows, self.kappa / rho))

    def well_posedness(self, graph: Any) -> WellPosedness:
        """Return how safe the fixed point is on graphs, with the parameters as they are now."""
        modes = [(module, module.training) for module in self.modules()]
        self.eval()  # a norm is computed anew, its estimates stay
        try:
            reset_norm(self)
        finally:
            for module, training in modes:
                module.training = training
        graph = self._fitting(graph)
        W = self.weight(graph).detach()
        bound = W.abs().sum(-1, dtype=graph.rho.dtype).amax(-1) * graph.rho
        return WellPosedness(bound, float((W != 0).double().mean()))

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, kappa={self.kappa}, start={self.start!r}"

    def _fitting(self, graph: Any) -> Graphs:
        """Return the graph in the precision of the layer, or in single if that is less."""
        return as_graphs(graph).to(torch.promote_types(self.Omega_1.dtype, torch.float32))


for _norm in ("weight_norm", "spectral_norm"):
    register_norm_module(ImplicitGraph, _norm, ["W", "Omega_1", "Omega_2"], [0, 0, 0])
