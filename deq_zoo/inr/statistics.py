"""Statistics of solves with one sample for each of very many points."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchdeq import SolverStat

_POINTS = 64  # of a block: the statistics of all points would need as much memory as their states


def thin(stats: SolverStat, most: int = _POINTS) -> SolverStat:
    """Return the statistics of a few of the points, evenly spread."""
    status = stats.status
    rows = torch.arange(0, len(status), max(1, len(status) // most), device=status.device)
    few = {name: value[rows] for name, value in stats.items() if len(value) == len(status)}
    return SolverStat(few, nfe=stats.nfe, status=status[rows])


def join(stats: Sequence[SolverStat]) -> SolverStat | None:
    """Return the statistics of several blocks as those of one solve; None without blocks.

    The trace of a block that stopped early repeats its last value; `nfe` is that of the block with
    the most evaluations.
    """
    if not stats:
        return None
    if len(stats) == 1:
        return stats[0]
    joined = {
        name: torch.cat(_as_long_as_longest([each[name] for each in stats]))
        for name, value in stats[0].items()
        if len(value) == len(stats[0].status)
    }
    nfe = max(each.nfe for each in stats)
    return SolverStat(joined, nfe=nfe, status=torch.cat([each.status for each in stats]))


def _as_long_as_longest(parts: list[Tensor]) -> list[Tensor]:
    if parts[0].dim() < 2:
        return parts
    longest = max(part.shape[1] for part in parts)
    return [
        torch.cat((part, part[:, -1:].expand(-1, longest - part.shape[1])), dim=1) for part in parts
    ]
