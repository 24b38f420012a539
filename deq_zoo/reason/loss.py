"""The loss of a supervision step: cross-entropy by stablemax, and of the halting head."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

#: The label of a cell that is not scored.
IGNORED = -100

CellLoss = Literal["stablemax", "softmax"]


def log_stablemax(logits: Tensor) -> Tensor:
    r"""Return log probabilities, in float64.

    $$p_i = s(a_i) / \sum_j s(a_j), \qquad s(a) = a + 1 \text{ if } a \ge 0, \text{ else }
    1 / (1 - a)$$
    """
    a = logits.double()
    # Each branch sees only numbers that it can take: gradients of the other would be NaN.
    s = torch.where(a >= 0, a.clamp_min(0) + 1, 1 / (1 - a.clamp_max(0)))
    return s.log() - s.sum(-1, keepdim=True).log()


def cell_losses(logits: Tensor, labels: Tensor, kind: CellLoss = "stablemax") -> Tensor:
    """Return the cross-entropy (B, L) of every cell; 0 for cells that are not scored."""
    scored = labels != IGNORED
    log_p = log_stablemax(logits) if kind == "stablemax" else F.log_softmax(_wide(logits), -1)
    picked = log_p.gather(-1, torch.where(scored, labels, 0)[..., None].long())[..., 0]
    return torch.where(scored, -picked, 0)


class Losses(NamedTuple):
    """Sums over the puzzles of a batch.

    Args:
        cells: of each puzzle's mean cross-entropy.
        halt: of the loss of the logit of halting.
        go_on: of the loss of the logit of going on; None unless there is a target for it.
        right: (B,) which puzzles have no wrong cell.
    """

    cells: Tensor
    halt: Tensor
    go_on: Tensor | None
    right: Tensor

    @property
    def total(self) -> Tensor:
        """Return what is differentiated, up to the size of the batch."""
        heads = self.halt if self.go_on is None else self.halt + self.go_on
        return self.cells + 0.5 * heads


def compute_losses(
    logits: Tensor,
    q: Tensor,
    labels: Tensor,
    target: Tensor | None = None,
    kind: CellLoss = "stablemax",
) -> Losses:
    """Return the losses of a batch.

    Args:
        logits: (B, L, V).
        q: (B, 2), the logits of halting and of going on.
        labels: (B, L), with `IGNORED` for cells that are not scored.
        target: (B,), the value of going on; None without.
        kind: of the cross-entropy.
    """
    scored = labels != IGNORED
    counts = scored.sum(1).clamp_min(1)
    cells = (cell_losses(logits, labels, kind) / counts[:, None]).sum()
    right = solved(logits, labels)
    bce = F.binary_cross_entropy_with_logits
    halt = bce(q[:, 0], right.to(q.dtype), reduction="sum")
    go_on = None if target is None else bce(q[:, 1], target.detach(), reduction="sum")
    return Losses(cells.to(q.dtype), halt, go_on, right)


def solved(logits: Tensor, labels: Tensor) -> Tensor:
    """Return (B,) which puzzles have no wrong cell."""
    return ((logits.argmax(-1) == labels) | (labels == IGNORED)).all(1)


def cell_accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return (B,) the share of scored cells that are right; 0 for a puzzle without any."""
    scored = labels != IGNORED
    right = (logits.argmax(-1) == labels) & scored
    return right.sum(1) / scored.sum(1).clamp_min(1)


def _wide(t: Tensor) -> Tensor:
    return t if t.dtype == torch.float64 else t.float()
