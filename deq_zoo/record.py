"""Statistics of many solves as numbers for logs and reports."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchdeq import SolverStat, Status


@dataclass
class SolverRecord:
    """Evaluations, residuals, statuses and the mean residual by step; reading syncs the device."""

    samples: int = 0
    nfe: float = 0.0  # summed over samples
    residual: float = 0.0  # relative, summed over samples where it is finite
    finite: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    radii: list[float] = field(default_factory=list)
    steps: Counter[int] = field(default_factory=Counter)  # samples by their evaluations
    _traces: list[Tensor] = field(default_factory=list)

    def add(self, stats: SolverStat | None) -> None:
        """Add the statistics of one solve; None, of a model without equilibrium, adds nothing."""
        if stats is None:
            return
        rel = stats["rel_lowest"].detach().double()
        n = len(rel)
        self.samples += n
        self.nfe += stats.nfe * n
        self.residual += float(rel[rel.isfinite()].sum())
        self.finite += int(rel.isfinite().sum())
        self.statuses.update(Status(code).name for code in stats.status.tolist())
        if stats["rel_trace"].dim() == 2 and stats["rel_trace"].shape[0] == n:
            self._traces.append(stats["rel_trace"].detach().double().cpu())
        self.steps.update(int(step) for step in stats["nstep"].tolist() if step >= 0)
        radius = stats["sradius"].detach().flatten()
        self.radii += [value for value in radius.tolist() if value >= 0]

    def trace(self) -> list[float]:
        """Return the median over samples of the relative residual after each evaluation."""
        rows = self._rows()
        return [float(v) for v in rows.nanmedian(dim=0).values] if len(rows) else []

    def band(self) -> list[list[float]]:
        """Return the residuals below which 10 % and 90 % of the samples are, by evaluation."""
        rows = self._rows()
        if not len(rows):
            return []
        finite = torch.where(rows.isfinite(), rows, torch.nan)
        # Not all at once: quantiles of large inputs are refused.
        edges = [column.nanquantile(rows.new_tensor([0.1, 0.9])) for column in finite.unbind(1)]
        return [[float(edge[i]) for edge in edges] for i in range(2)]

    def _rows(self) -> Tensor:
        """Return the traces of all samples, of one length."""
        longest = max((t.shape[1] for t in self._traces), default=0)
        if not longest:
            return torch.empty(0, 0)
        return torch.cat([_extended(t, longest) for t in self._traces])

    def summary(self) -> dict[str, Any]:
        """Return everything as plain numbers."""
        n = max(1, self.samples)
        summary: dict[str, Any] = {
            "nfe": self.nfe / n,
            "residual": self.residual / self.finite if self.finite else float("nan"),
            "statuses": dict(self.statuses),
            "trace": self.trace(),
            "band": self.band(),
            "steps": {str(step): count for step, count in sorted(self.steps.items())},
        }
        if self.radii:
            summary["spectral_radius"] = sum(self.radii) / len(self.radii)
        return summary


def _extended(trace: Tensor, length: int) -> Tensor:
    """Return traces of another length: one that ended early keeps its last value."""
    if not trace.shape[1]:
        return trace.new_full((len(trace), length), torch.nan)
    return torch.cat((trace, trace[:, -1:].expand(-1, length - trace.shape[1])), dim=1)
