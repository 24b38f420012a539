"""Records: the solves of one layer over several calls, as numbers."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any, Literal

import torch

from torchdeq.stats import SolverStat
from torchdeq.stopping import Status

Side = Literal["forward", "backward"]


@dataclass(frozen=True)
class Record:
    """The solves of one layer and one side between two lines of the log.

    Args:
        layer: the path of the DEQ in the model.
        side: `"forward"`, or `"backward"` for the adjoint of an implicit gradient.
        step: training calls of the layer so far.
        calls: solves in this record.
        samples: samples in them.
        nfe: mean evaluations (backward: products) of a solve.
        residual: median over samples; forward relative to the state, backward to the cotangent.
        worst: the largest residual of a sample; infinite if one is not finite.
        statuses: samples by status.
    """

    layer: str
    side: Side
    step: int
    calls: int
    samples: int
    nfe: float
    residual: float
    worst: float
    statuses: dict[str, int]

    @property
    def failed(self) -> float:
        """Return the share of samples that neither converged nor stalled."""
        good = self.statuses.get("CONVERGED", 0) + self.statuses.get("STALLED", 0)
        return 1 - good / self.samples if self.samples else 0.0

    def as_data(self) -> dict[str, Any]:
        """Return the record as plain values; NaN and infinity are None."""
        values = asdict(self).items()
        return {k: None if isinstance(v, float) and not isfinite(v) else v for k, v in values}


class Pile:
    """Statistics of solves that nobody has read yet: adding one costs nothing on the device."""

    def __init__(self) -> None:
        self._stats: list[SolverStat] = []

    def __len__(self) -> int:
        return len(self._stats)

    def add(self, stats: SolverStat) -> None:
        """Add the statistics of one solve."""
        self._stats.append(stats)

    def empty(self, layer: str, side: Side, step: int) -> Record | None:
        """Return a record of all statistics, which reads the device, and start anew."""
        piled, self._stats = self._stats, []
        if not piled:
            return None
        key = "rel_lowest" if side == "forward" else "abs_lowest"
        residuals = torch.cat([s[key].detach().flatten().double().cpu() for s in piled])
        statuses = Counter(Status(code).name for s in piled for code in s.status.tolist())
        nfe = sum(s.nfe for s in piled) / len(piled)
        finite = residuals[residuals.isfinite()]
        median = float(finite.median()) if len(finite) else float("inf")
        worst = float(residuals.nan_to_num(nan=float("inf")).max()) if len(residuals) else 0.0
        return Record(
            layer, side, step, len(piled), len(residuals), nfe, median, worst, dict(statuses)
        )
