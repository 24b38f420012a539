"""The window of past iterates that Anderson acceleration mixes: its interface.

Buffers are slot-major, `[m, B, D]`, and written in place: no step shifts or stacks them. They store
half-precision states in single precision, because mixing weights of alternating sign would amplify
the rounding. The small linear systems are in float64. A device without float64 solves them in
float32, with a ridge that is large enough for this precision, so that the host reads nothing back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

import torch
from torch import Tensor

from torchdeq.numbers import small_dtype, unit_scale
from torchdeq.solver.base import FixedPointFn, Iterate

#: Least relative ridge: keeps the small system invertible if residuals repeat.
_LEAST_LAM = {torch.float64: 1e-14, torch.float32: 1e-6}


class Window(ABC):
    """A window of past iterates.

    Args:
        z: (B, D) a state, for its shape, dtype and device.
        m: iterates to keep.
        lam: ridge relative to the size of each residual.
        ridge: absolute ridge on the squared residuals.
        restart: empty the window whenever it is full.
    """

    def __init__(self, z: Tensor, m: int, lam: float, ridge: float, restart: bool) -> None:
        self.m, self.restart, self.dtype, self.count = m, restart, z.dtype, 0
        self.small = small_dtype(z.device)
        self.lam, self.ridge = max(lam, _LEAST_LAM[self.small]), ridge
        self.unit: Tensor | None = None  # (B, 1, 1) one over the size of the first residual

    @abstractmethod
    def evaluate(self, f: FixedPointFn, z: Tensor) -> Iterate:
        """Evaluate `f` at `z`, insert the iterate and return it."""

    @abstractmethod
    def insert(self, it: Iterate) -> None:
        """Insert an iterate; the oldest one leaves a full window."""

    @abstractmethod
    def mix(self, tau: float) -> Tensor:
        """Return the next point, (B, D), with damping `tau`."""

    @abstractmethod
    def guard(self, growth: float) -> None:
        """Empty the window of samples whose last residual grew by more than `growth`.

        Only their newest iterate stays.
        """

    @abstractmethod
    def take(self, rows: Tensor) -> Self:
        """Return the window of some of the samples."""

    def _set_unit(self, first: Tensor, moderate: bool) -> None:
        """Set the unit from the first residuals, (B, D), if their squares could leave the range."""
        unit = None if moderate else unit_scale(first)
        self.unit = None if unit is None else unit[:, :, None]
