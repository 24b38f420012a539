"""A field together with the grid of its signal: one model file is one signal."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from deq_zoo.errors import ZooError
from deq_zoo.inr.blocks import block_size
from deq_zoo.inr.evaluation import evaluate_blocks
from deq_zoo.inr.model import Field
from deq_zoo.inr.rendering import Rendering, check_region, choose_shape
from deq_zoo.inr.signal import DIMENSIONS, Grid, Kind
from deq_zoo.inr.statistics import join, thin
from deq_zoo.model import Model
from deq_zoo.output import Output

_KINDS: dict[int, Kind] = {d: kind for kind, d in DIMENSIONS.items()}  # type: ignore[misc]
_FORMER_GRID = "frame"  # a buffer of earlier versions: 1000 times the rate, then the shape

#: Input of `Representation.predict`.
PointsOrSize = Tensor | tuple[int, ...] | Rendering | None


class Representation(Model):
    """A signal as a field, with the grid that the signal was sampled on.

    Args:
        field: the network.
        grid: samples along each axis, and their rate; None if unknown.
    """

    def __init__(self, field: Field, grid: Grid | None = None) -> None:
        super().__init__()
        self.field, self.grid = field, grid

    @property
    def deq(self) -> nn.Module | None:
        """Return the DEQ of the field; None if the field is explicit."""
        return getattr(self.field, "deq", None)

    def forward(
        self, x: Tensor, z0: Tensor | None = None, **call: Any
    ) -> Output[Tensor, Tensor | None]:
        """Return the values of the field at points; see `DEQField.forward`."""
        out: Output[Tensor, Tensor | None] = self.field(x, z0, **call)
        return out

    def predict(
        self, x: PointsOrSize = None, z0: Tensor | None = None, **call: Any
    ) -> Output[Tensor, Tensor | None]:
        """Return the signal at some points, or as a whole at any resolution.

        Values are those that `write_signal` takes: the samples of a sound, or the brightness of
        pixels from -1 (black) to 1 (white).

        Args:
            x: coordinates (..., d) give values (..., c); a size such as (512, 768) gives the
                signal with so many samples along each axis; a `Rendering` more choice; None the
                signal on its own grid.
            z0: (N, width) states to start from; for coordinates only.
            **call: options of this call of the DEQ.

        Returns:
            The output: its `state` is None for a whole signal, whose states are too large to keep;
            its statistics are those of a few points of each block.
        """
        return super().predict(x, z0, **call)

    def _predict(
        self, x: PointsOrSize, z0: Tensor | None, **call: Any
    ) -> Output[Tensor, Tensor | None]:
        if isinstance(x, Tensor):
            return self.field.predict(x, z0, **call)
        if z0 is not None:
            raise TypeError("a start z0 belongs to coordinates: drop it to render a whole signal")
        options = x if isinstance(x, Rendering) else Rendering(size=tuple(x or ()))
        shape = choose_shape(self, options)
        region = check_region(options.region, len(shape))
        parts, stats = [], []
        for out in evaluate_blocks(
            self.field, shape, torch.arange(prod(shape)), self.block, region, **call
        ):
            parts.append(out.prediction.float().cpu())
            stats += [] if out.stats is None else [thin(out.stats)]
        return Output([torch.cat(parts).view(*shape, -1)], None, join(stats))

    @property
    def block(self) -> int:
        """Return how many points are computed at once."""
        return block_size(self.field.width)

    @property
    def kind(self) -> Kind:
        """Return the kind of signal, by the coordinates of the field."""
        return _KINDS[self.field.d]

    @property
    def rate(self) -> float:
        """Return samples or frames per second; 0 if unknown."""
        return self.grid.rate if self.grid else 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the samples of the signal along each axis; raise `ZooError` if unknown."""
        if self.grid is None:
            raise ZooError("this model does not know the size of its signal: give --size")
        return self.grid.shape

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        """Load weights; those of earlier versions have the grid among them."""
        former = state_dict.pop(prefix + _FORMER_GRID, None)
        if former is not None and self.grid is None:
            rate, *shape = former.tolist()
            self.grid = Grid(tuple(shape), rate / 1000) if all(shape) else None
        super()._load_from_state_dict(state_dict, prefix, *args)
