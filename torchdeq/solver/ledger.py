"""The ledger of a solve: residuals, best state and progress of each sample."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from torchdeq.solver.base import Iterate, Problem
from torchdeq.solver.best_states import BestStates
from torchdeq.solver.residual_history import ResidualHistory, measure
from torchdeq.trace import Trace


class Ledger(ABC):
    """The record of a solve, with the state that the solve will return for each sample.

    That is the first state that meets the tolerance; if none does, the state with the lowest
    residual; if no residual is finite, the start.

    Args:
        problem: the problem to solve.
        every: iterates to compare at once.
    """

    def __init__(self, problem: Problem, every: int) -> None:
        self.running = len(problem.z0)  # unfinished samples, as of the last check
        self._peers = problem.f.packed.peers
        self._every = every
        self._best = BestStates(problem.z0)
        self._history = ResidualHistory(problem)
        self._pending: list[Iterate] = []
        self._measured: list[Tensor | None] = []  # their residuals, (2, b) each

    @property
    def going(self) -> bool:
        """Return whether the solve goes on, in this process or in one that needs this one."""
        return self.running > 0 or self._peers.synchronised

    @property
    def moderate(self) -> bool:
        """Return whether the host knows that the last residuals are not very large or small."""
        return False

    def observe(self, it: Iterate, nfe: int) -> None:
        """Record an iterate that is available after `nfe` evaluations."""
        self._history.nfe.append(nfe)
        self._best.pass_step()
        self._measured.append(self._measure(it))
        self._pending.append(it if self._every == 1 else self._lasting(it))
        if len(self._pending) >= self._every:
            self.flush()
        self._best.copy_expired()

    def _measure(self, it: Iterate) -> Tensor | None:
        """Return (2, b) the residuals of an iterate; None to measure them at the comparison."""
        return measure(it)

    def _lasting(self, it: Iterate) -> Iterate:
        """Return an iterate that lasts until the other iterates of its comparison are there."""
        it = it._replace(g=None, square=None)  # they may be in buffers of the solver
        if it.fresh or it.lasts >= self._every - len(self._pending):
            return it
        return it._replace(fz=it.fz.clone(), x=None if it.x is None else it.x.clone(), fresh=True)

    def flush(self) -> None:
        """Compare the pending iterates with the best states."""
        if self._pending:
            pending, measured = self._pending, self._measured
            self._pending, self._measured = [], []
            self._compare(pending, measured)

    @abstractmethod
    def _compare(self, pending: list[Iterate], measured: list[Tensor | None]) -> None:
        """Compare iterates with the best states and append their residuals to the history."""

    def snapshot(self) -> Tensor:
        """Return the best state so far of every sample, (B, D), which later steps do not change."""
        self.flush()
        return self._best.snapshot()

    def compact(self) -> Tensor:
        """Drop the finished samples from the batch; return the rows of those that stay."""
        raise NotImplementedError("without a tolerance no sample finishes")

    def trace(self) -> Trace:
        """Return the trace, (N, B); samples that left the batch keep their last values."""
        self.flush()
        sizes, norms = self._history.whole()
        scores, stalled = self._shared_scores(), self._stalled()
        return Trace(
            sizes,
            norms,
            self._history.nfe,
            None if stalled is None else stalled.to(sizes.device),
            torch.stack(scores).to(sizes.device) if scores else None,
        )

    def _shared_scores(self) -> list[Tensor]:
        """Return the scores of the iterates, (b,) each, if all samples share one iterate."""
        return []

    def _stalled(self) -> Tensor | None:
        """Return (B,) the iterate at which each sample stalled, else -1; None if none did."""
        return None
