"""The states of all points, kept from step to step: where the next step starts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from deq_zoo.errors import DataError

#: Bytes that the states of all points may take.
BUDGET = 8_000_000_000


def check_memory(n: int, width: int) -> None:
    """Refuse states that are larger than the budget."""
    size = 4 * n * width
    if size > BUDGET:
        raise DataError(
            f"the warm states of {n:,} points of width {width} take {size / 1e9:.1f} GB, more than "
            f"{BUDGET / 1e9:.0f}: make pictures smaller with --set shrink=2, the state with --set "
            "width=128, take a part with --set side= or length=, or solve at every step with --set "
            "warm=false"
        )


class States:
    """A state for each of n points, (n, width), zero until a point has been visited.

    The fixed point of a point moves little in one update. From its last state a few steps of the
    gradient follow it, and no solve is needed. A block with a point that was never visited is
    solved; points that come back after other batches start from where they were left.

    Args:
        kept: the states.
        seen: (n,) which points have been visited.
    """

    def __init__(self, kept: Tensor, seen: Tensor) -> None:
        self.kept, self.seen = kept, seen

    @classmethod
    def of(cls, carry: Any, n: int, width: int, model: nn.Module) -> States:
        """What a step carried on, or a new start."""
        if carry is not None:
            return cls(carry["kept"], carry["seen"])
        check_memory(n, width)
        like = next(model.parameters())
        return cls(like.new_zeros(n, width), like.new_zeros(n, dtype=torch.bool))

    def start(self, places: Tensor) -> tuple[Tensor, bool]:
        """The states of some points, and whether all of them have been visited."""
        return self.kept[places], bool(self.seen[places].all())

    def keep(self, places: Tensor, z: Tensor) -> None:
        """Take note of where some points are now."""
        self.kept[places] = z.detach().to(self.kept.dtype)
        self.seen[places] = True

    def carry(self) -> dict[str, Tensor]:
        """Tensors for the next step and for checkpoints."""
        return {"kept": self.kept, "seen": self.seen}
