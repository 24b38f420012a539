"""The output of a segment of text, and the memory that the next segment reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from deq_zoo.output import Output
from torchdeq import SolverStat


@dataclass(frozen=True, kw_only=True)
class LMOutput(Output[Tensor, Tensor]):
    """The output of a language model for a segment.

    `predictions` are hidden states (B, L, D) with their graphs: `model.nll` and `model.log_prob`
    decode them, since the probabilities of a whole vocabulary take much memory.

    Args:
        stats: statistics of the solve.
        u: (B, L, 3D) the injection; of an attractor, (B, 0, D): its memory needs none.
        kept: (B, L, M) the part of the last state that a memory keeps, without a graph.
        f: the map of this solve, e.g. for regularisation.
    """

    stats: SolverStat
    u: Tensor
    kept: Tensor
    f: Callable[[Tensor], Tensor]

    @property
    def z(self) -> Tensor:
        """Return the last hidden states (B, L, D), with their graph."""
        return self.prediction


class Memory(NamedTuple):
    """Earlier tokens without a graph: states (B, Lm, M) and injections (B, Lm, 3D).

    M is D, or D times the number of blocks in the convergent design. An attractor keeps the keys,
    before their rotation, and values of all blocks, 2D numbers each, and no injections.
    """

    z: Tensor
    u: Tensor

    def followed_by(self, out: LMOutput, most: int) -> Memory:
        """Return the last `most` tokens of this memory and of a segment after it."""
        z, u = out.kept, out.u.detach()
        keep = max(0, most - z.shape[1])
        old = slice(max(0, self.z.shape[1] - keep), None)
        new = slice(max(0, z.shape[1] - most), None)
        return Memory(
            torch.cat((self.z[:, old], z[:, new]), dim=1),
            torch.cat((self.u[:, old], u[:, new]), dim=1),
        )
