"""A field together with what it takes to render it: one model file is one signal."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from deq_zoo.errors import ZooError
from deq_zoo.inr.model import Field, Output
from deq_zoo.inr.signal import DIMENSIONS, Kind

_KINDS: dict[int, Kind] = {d: kind for kind, d in DIMENSIONS.items()}  # type: ignore[misc]
_FINE = 1000  # the rate is kept in thousandths, as a whole number


class Representation(nn.Module):
    """A field and the grid its signal was sampled on.

    Args:
        field: the representation.
    """

    frame: Tensor

    def __init__(self, field: Field) -> None:
        super().__init__()
        self.field = field
        # A whole number survives every change of dtype: rate, then samples along each axis.
        self.register_buffer("frame", torch.zeros(1 + field.d, dtype=torch.int64))

    def forward(self, x: Tensor, z0: Tensor | None = None, **call: Any) -> Output:
        """The values of the field."""
        out: Output = self.field(x, z0, **call)
        return out

    def frame_(self, shape: tuple[int, ...], rate: float) -> Representation:
        """Say what grid the signal has."""
        self.frame.copy_(torch.tensor([round(_FINE * rate), *shape]))
        return self

    @property
    def kind(self) -> Kind:
        return _KINDS[self.field.d]

    @property
    def rate(self) -> float:
        """Samples or frames per second."""
        return int(self.frame[0]) / _FINE

    @property
    def shape(self) -> tuple[int, ...]:
        """Samples along each axis."""
        shape = tuple(self.frame[1:].tolist())
        if not all(shape):
            raise ZooError("this model does not know the size of its signal: give --size")
        return shape
