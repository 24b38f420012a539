"""The ledger whose decisions the host makes, after one transfer of residuals per check."""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from torchdeq import numbers
from torchdeq.solver.base import SMALL, Iterate, Problem
from torchdeq.solver.few_judge import FEW, FewJudge
from torchdeq.solver.judge import Judge
from torchdeq.solver.ledger import Ledger
from torchdeq.solver.pacing import Pace
from torchdeq.solver.residual_history import as_block, measure_safely

_MOST, _MOST_OF_LARGE = 16, 4  # evaluations between two checks, whose states are all kept


class HostLedger(Ledger):
    """A ledger for solves with a tolerance, and for states in the memory of the host.

    The device measures residuals and copies states. All bookkeeping happens on the host, which
    reads the residuals of `check_every` iterates at once.
    """

    def __init__(self, problem: Problem) -> None:
        stop, f = problem.stop, problem.f
        super().__init__(problem, stop.interval if stop.goal else 1)
        paced = stop.check_every == "auto" and not numbers.reads_are_free(problem.z0.device)
        most = _MOST if problem.z0.numel() <= SMALL else _MOST_OF_LARGE
        self._pace = Pace(stop.goal, most) if paced and stop.goal else None
        lowest = problem.lowest
        if lowest is None:
            lowest = torch.full((self.running,), inf, dtype=self._history.dtype)
        kind = FewJudge if self.running <= FEW else Judge
        self._judge = kind(
            stop, lowest.to(numbers.HOST), lambda: f.packed.eps, problem.shared, self._peers
        )
        self._scale: Tensor | None = None  # (b,) the divisors of residuals, on the host
        self._last: Tensor | None = None  # the values of the last check
        self._whole_best: Tensor | None = None  # (B, D) the best states when samples left
        self._going = True
        self._spans = f.packed.spans  # whether rows continue in other processes
        self._length = stop.length(problem.z0.shape[1]) if stop.norm == "rms" else None

    @property
    def going(self) -> bool:
        # Before the first check this process may have no samples, and others may have some.
        return super().going if self._last is None else self._going

    @property
    def moderate(self) -> bool:
        """Return whether no residual of the last check is very large or small."""
        return self._last is not None and numbers.are_moderate(self._last[0].flatten())

    def _compare(self, pending: list[Iterate], measured: list[Tensor | None]) -> None:
        block = as_block(measured)
        values = self._transfer(block)
        if not numbers.in_range(values):
            block, values = self._measured_again(pending, block, values)
        if self._spans and self._peers.synchronised:
            block, values = self._joined(block)
        self._history.append(block)
        self._last = values
        if self._scale is not None:
            values = values / self._scale
        for which, better in self._judge.update(values):
            if better is None:
                self._best.adopt(pending[which], age=len(pending) - 1 - which)
            else:
                self._best.replace_some(better, pending[which])
        self.running = self._judge.running
        if self._pace is not None and self.running:
            nfe = self._history.nfe[-1]
            self._every = self._pace.next_interval(self._judge.worst, nfe)
        self._going = self.running > 0
        if self._peers.synchronised:
            self._agree()

    def _agree(self) -> None:
        """Go on as long as any process does, with the shortest interval until the next check."""
        interval = float(self._every) if self.running else inf
        going, least = self._peers.largest([float(self._going), -interval])
        self._going = going > 0
        self._every = int(-least) if -least < inf else self._every

    def _joined(self, block: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residuals of a system that all processes share, and the same on the host."""
        if self._length is None:
            block = self._peers.joint_norm(block)
        else:  # the history divides by the length of the rows in this process
            rows = torch.cat((block.flatten(), block.new_tensor([self._length])))
            rows = self._peers.joint_norm(rows)
            block = rows[:-1].view(block.shape) * (self._length / rows[-1])
        return block, block.to(numbers.HOST)

    def _transfer(self, block: Tensor) -> Tensor:
        """Return (2, K, b) residuals on the host; the first transfer also moves their divisors."""
        scale = self._history.scale
        if scale is None or self._scale is not None:
            return block.to(numbers.HOST)
        rows = torch.cat((block.flatten(0, 1), scale[None].to(block.dtype))).to(numbers.HOST)
        self._scale = rows[-1]
        return rows[:-1].view(block.shape)

    def _measured_again(
        self, pending: list[Iterate], block: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return residuals whose squares left the range again, by safe norms, and on the host.

        Finished samples are not worth it: the residual of many of them is exactly zero.
        """
        if not bool(numbers.outside_range(values[..., self._judge.unfinished()]).any()):
            return block, values
        safe = torch.stack([measure_safely(it) for it in pending], dim=1)
        block = torch.where(numbers.outside_range(block), safe.to(block.dtype), block)
        return block, block.to(numbers.HOST)

    def snapshot(self) -> Tensor:
        best = super().snapshot()
        if self._whole_best is None or self._history.rows is None:
            return best
        return self._whole_best.index_copy(0, self._history.rows, best)

    def compact(self) -> Tensor:
        self._whole_best = self.snapshot()
        on_host = self._judge.unfinished()
        rows = on_host.to(self._whole_best.device)
        self._judge.keep(on_host)
        self._history.keep(rows)
        self._best.keep(rows)
        self._scale = None if self._scale is None else self._scale[on_host]
        return rows

    def _shared_scores(self) -> list[Tensor]:
        return self._judge.scores

    def _stalled(self) -> Tensor | None:
        return self._judge.stalled
