"""One call of a DEQ module: its arguments, and the solves that a core can make with them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from torchdeq.config import DEQConfig
from torchdeq.coupling import Coupling
from torchdeq.distributed.peers import find_peers
from torchdeq.functional import fixed_point
from torchdeq.grad import Backward, Phantom, Writer, make_backwards
from torchdeq.loss import spectral_radius
from torchdeq.packed import PackedFn
from torchdeq.packing import Packing
from torchdeq.pytree import State
from torchdeq.solution import FixedPoint
from torchdeq.solver import Solver
from torchdeq.stats import SolverStat
from torchdeq.tracing import graph_solver


@dataclass(frozen=True)
class ForwardPass:
    """One call of a DEQ module, as a core sees it."""

    func: Callable[..., State]
    z0: State
    args: tuple[Any, ...]
    solver: Solver[Any]
    config: DEQConfig
    writer: Writer | None
    compact: bool
    return_final: bool = False

    def backwards(self, n: int) -> list[Backward]:
        """Return one backward for each of `n` states."""
        return make_backwards(self.config, n, self.writer)

    def solve(
        self,
        z0: State,
        budget: int,
        backward: Backward,
        record: list[tuple[int, Backward]] | None = None,
        keep_estimate: bool = False,
    ) -> FixedPoint[State]:
        """Return a differentiable fixed point from `z0` after at most `budget` evaluations."""
        return fixed_point(
            self.func,
            z0,
            self.args,
            solver=self.solver,
            backward=backward,
            stop=replace(self.config.f_stop, max_iter=budget, return_final=self.return_final),
            record=record or (),
            compact=self.compact,
            on_failure=self.config.on_failure,
            keep_estimate=keep_estimate,
            coupled=cast(Coupling, self.config.coupled),
        )

    def evaluate(self, budget: int) -> tuple[State, SolverStat]:
        """Return the estimate of the solver, or without a budget the state that training unrolls.

        The statistics of the solve come second.
        """
        (backward,) = self.backwards(1)
        if isinstance(backward, Phantom):  # without sup_gap and sup_loc: the last state only
            backward = Phantom(grad=backward.grad, tau=backward.tau)
        solution = self.solve(self.z0, budget, backward, keep_estimate=budget > 0)
        return solution.z, solution.stats

    def spectral_radius(self, z: State) -> Tensor:
        """Return (B,) the spectral radius of the Jacobian at `z`; raise during an export."""
        if graph_solver() is not None:
            raise ValueError(
                "spectral radii cannot be exported, since a graph computes no gradients: drop "
                "sradius_mode for the export"
            )
        packing = Packing(z)
        h = packing.pack(z).detach().requires_grad_()
        peers = find_peers(self.func, self.config.sync_stop, packing.device)
        with torch.enable_grad(), peers.forward():
            fz = PackedFn(packing, self.func, self.args)(h)

        def vjp(v: Tensor) -> Tensor:
            (product,) = torch.autograd.grad(fz, h, v, retain_graph=True, allow_unused=True)
            return torch.zeros_like(v) if product is None else product

        if not fz.requires_grad:
            return h.new_zeros(len(h))
        running = getattr(self.func, "running", nullcontext)  # of a map that `compile_f` compiled
        with peers.backward(), running():
            return spectral_radius(vjp, h, any_process=peers.any).radius
