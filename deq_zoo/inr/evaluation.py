"""Values of a field at very many samples, computed block by block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from deq_zoo.compaction import Compaction
from deq_zoo.inr.model import Field
from deq_zoo.inr.signal import coordinates
from deq_zoo.output import Output


def evaluate_blocks(
    field: Field,
    shape: Sequence[int],
    rows: Tensor,
    block: int,
    region: Sequence[float] = (),
    **call: Any,
) -> Iterator[Output[Tensor, Tensor | None]]:
    """Yield the outputs of a field at samples of a grid.

    Args:
        field: on its device.
        shape: of the grid.
        rows: numbers of samples.
        block: samples at once.
        region: the part that the grid covers; see `coordinates`.
        **call: options of each call of the field.
    """
    like, solve = next(field.parameters()), Compaction(field)
    for part in rows.split(block):
        yield solve(coordinates(shape, part.to(like.device), like.dtype, region), **call)
