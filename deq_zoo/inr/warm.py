"""The states of all points, kept from step to step: the starts of the next step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deq_zoo.errors import DataError

#: The most bytes that the states of all points may take.
BUDGET = 8_000_000_000


def check_memory(n: int, width: int) -> None:
    """Raise `DataError` if the states of n points are larger than the budget."""
    size = 4 * n * width
    if size > BUDGET:
        raise DataError(
            f"the warm states of {n:,} points of width {width} take {size / 1e9:.1f} GB, more than "
            f"{BUDGET / 1e9:.0f}: make pictures smaller with --set shrink=2, the state with --set "
            "width=128, take a part with --set side= or length=, or solve at every step with --set "
            "warm=false"
        )


class States:
    """A state for each of n points, (n, width), zero until a batch has had the point.

    The fixed point of a point moves little in one update: the few steps of the gradient, from the
    last state, follow it without a solve. A block with a point that no batch has had yet is solved.
    Points that come back after other batches start from their last states.

    Args:
        kept: the states.
        seen: (n,) whether a batch has had each point.
    """

    def __init__(self, kept: Tensor, seen: Tensor) -> None:
        self.kept, self.seen = kept, seen

    @classmethod
    def of(cls, carry: Any, n: int, width: int, model: nn.Module) -> States:
        """Return the states that the step before carried on, or zeros at the first step."""
        if carry is not None:
            return cls(carry["kept"], carry["seen"])
        check_memory(n, width)
        like = next(model.parameters())
        return cls(like.new_zeros(n, width), like.new_zeros(n, dtype=torch.bool))

    @classmethod
    def merged(cls, carries: Sequence[dict[str, Tensor]]) -> States:
        """Return the states of several processes as those of one, each point's from one of them."""
        kept, seen = (carries[0][name].clone() for name in ("kept", "seen"))
        for carry in carries[1:]:
            kept[carry["seen"]] = carry["kept"][carry["seen"]]
            seen |= carry["seen"]
        return cls(kept, seen)

    def start(self, places: Tensor) -> tuple[Tensor, bool]:
        """Return the states of some points, and whether earlier batches had all of them."""
        return self.kept[places], bool(self.seen[places].all())

    def keep(self, places: Tensor, z: Tensor) -> None:
        """Replace the states of some points."""
        self.kept[places] = z.detach().to(self.kept.dtype)
        self.seen[places] = True

    def carry(self) -> dict[str, Tensor]:
        """Return the tensors for the next step and for checkpoints."""
        return {"kept": self.kept, "seen": self.seen}
