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

from torchdeq.numbers import small_dtype, unit_scale, units_with
from torchdeq.solver.base import FixedPointFn, Iterate
from torchdeq.solver.starts import Starts

#: Least relative ridge: keeps the small system invertible if residuals repeat.
LEAST_LAM = {torch.float64: 1e-14, torch.float32: 1e-6}


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
        self.lam, self.ridge = max(lam, LEAST_LAM[self.small]), ridge
        self.unit: Tensor | None = None  # (B, 1, 1) one over the size of the first residual
        self._starts = Starts()  # the number of the first iterate of each sample
        self._fresh: Tensor | None = None  # samples that begin with the next iterate

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

    @abstractmethod
    def put(self, rows: Tensor, z: Tensor) -> None:
        """Empty the window of some of the samples; their next point is `z`, (n, D).

        Args:
            rows: the numbers of these samples, on the host.
            z: (n, D) the points, on the device.
        """

    def _set_unit(self, first: Tensor, moderate: bool) -> None:
        """Set the unit from the first residuals, (B, D), if their squares could leave the range."""
        unit = None if moderate else unit_scale(first)
        self.unit = None if unit is None else unit[:, :, None]

    def _check_settled(self) -> None:
        """Raise if samples have been put and not evaluated: their rows must not move then."""
        if self._fresh is not None:
            raise RuntimeError("take the rows of a window before put, or after the next step")

    def _mark_fresh(self, rows: Tensor) -> None:
        """Remember the samples that begin with the next iterate."""
        self._fresh = rows if self._fresh is None else torch.cat((self._fresh, rows))

    def _take_fresh(self, residual: Tensor) -> Tensor | None:
        """Return the samples that begin with this iterate; set their units from its residuals.

        Args:
            residual: (B, D) of all samples.
        """
        fresh, self._fresh = self._fresh, None
        if fresh is None:
            return None
        new = unit_scale(residual.index_select(0, fresh))
        if new is not None or self.unit is not None:
            units = None if self.unit is None else self.unit[:, :, 0]
            self.unit = units_with(units, fresh, new, len(residual))[:, :, None]
        return fresh
