"""The calls of `f` in an iteration, recorded so that each can be repeated in the backward pass."""

from __future__ import annotations

import torch
from torch import Tensor

from torchdeq import _torch
from torchdeq.grad.capture import Capture, observe
from torchdeq.grad.watching import Inputs
from torchdeq.modules import ModuleState
from torchdeq.numbers import row_norm
from torchdeq.packed import PackedFn
from torchdeq.randomness import Randomness
from torchdeq.stats import SolverStat
from torchdeq.stopping import Status, StopRule, relative


class RecordedCalls:
    """`f` with a record of every call: its inputs, its random numbers and its residual.

    Every step contributes to the gradient of an iteration, and control flow may differ between
    steps, so every call is watched for its inputs. Without a graph, and under function transforms,
    no call is watched.
    """

    def __init__(self, f: PackedFn, stop: StopRule) -> None:
        self.f, self.stop = f, stop
        self._watches = torch.is_grad_enabled() and not _torch.transforms_active()
        self._inputs: Inputs = {}
        self._calls: list[tuple[frozenset[int], Randomness | None]] = []
        self._modules: ModuleState | None = None
        self._kept = f
        self._residuals: list[Tensor] = []
        self._norms: list[Tensor] = []

    def __call__(self, z: Tensor) -> Tensor:
        if _torch.transforms_active():
            return self.f(z)
        z = z.to(self.f.packing.dtype)
        if self._watches:
            fz, inputs, randomness = observe(self.f, z)
            self._inputs |= inputs
            self._calls.append((frozenset(inputs), randomness))
        else:
            fz = self.f(z)
        self._residuals.append(row_norm(fz - z))
        self._norms.append(row_norm(fz))
        return fz

    @property
    def steps(self) -> int:
        """Return the number of recorded calls."""
        return len(self._calls)

    @property
    def inputs(self) -> list[Tensor]:
        """Return the inputs of all calls together."""
        return self._capture(frozenset(), None).inputs

    def repeat(self, k: int, z: Tensor, c: list[Tensor]) -> Tensor:
        """Return `f(z)` as in call number `k`, with the tensors `c` as inputs."""
        return self._capture(*self._calls[k]).replay(*c)(z)

    def _capture(self, used: frozenset[int], randomness: Randomness | None) -> Capture:
        if self._modules is None:
            self._modules = ModuleState(self.f.f)  # the first use is after all calls
            self._kept = self.f.with_own_closure()
        return Capture(self._kept, self._inputs, used, self._modules, randomness)

    def stats(self) -> SolverStat:
        """Return the statistics of the last call.

        The iteration neither stops early nor goes back to its best state.
        """
        if not self._residuals:
            batch = self.f.packing.batch
            return SolverStat(status=torch.full((batch,), int(Status.MAX_ITER), dtype=torch.int8))
        residuals, norms = torch.stack(self._residuals), torch.stack(self._norms)  # (N, B)
        rel, last = relative(residuals, norms), self.stop.measure(residuals[-1], norms[-1])
        met = (last <= self.stop.goal) & bool(self.stop.goal)
        status = torch.where(met, int(Status.CONVERGED), int(Status.MAX_ITER))
        status = torch.where(last.isfinite(), status, int(Status.NONFINITE)).to(torch.int8)
        return SolverStat(
            abs_lowest=residuals[-1],
            rel_lowest=rel[-1],
            abs_trace=residuals.mT,
            rel_trace=rel.mT,
            nstep=torch.full_like(residuals[-1], len(residuals)),
            nfe=len(residuals),
            status=status,
        )
