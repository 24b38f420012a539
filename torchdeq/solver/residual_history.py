"""The residuals of a solve: their measurement on the device, and the record of all iterates."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchdeq import numbers
from torchdeq.numbers import row_norm
from torchdeq.solver.base import SMALL, Iterate, Problem


def measure(it: Iterate) -> Tensor:
    """Return (2, b): $|g|$ and $|f(z)|$ by plain norms, whose squares may leave the range.

    Of small states, one norm of both takes two thirds of the time of two norms.
    """
    if it.square is None and it.fz.numel() <= SMALL:
        return numbers.plain_norms(torch.stack((it.residual, it.fz)))
    pair = it.fz.new_empty(2, len(it.fz), dtype=numbers.norm_dtype(it.fz.dtype))
    size, norm = pair.unbind(0)
    if it.square is None:
        numbers.plain_norm(it.residual, out=size)
    else:
        torch.sqrt(it.square, out=size)
    numbers.plain_norm(it.fz, out=norm)
    return pair


def measure_safely(it: Iterate) -> Tensor:
    """Return (2, b): $|g|$ and $|f(z)|$ by norms whose squares stay in range.

    Single precision is summed in double precision and stays there until it is compared.
    """
    if numbers.norm_dtype(it.fz.dtype) == torch.float64 or not numbers.has_double(it.fz.device):
        return torch.stack((row_norm(it.residual), row_norm(it.fz)))
    pair = it.fz.new_empty(2, len(it.fz), dtype=torch.float64)
    size, norm = pair.unbind(0)
    numbers.plain_norm(it.residual, out=size)
    numbers.plain_norm(it.fz, out=norm)
    return pair


def as_block(rows: Sequence[Tensor | None]) -> Tensor:
    """Return the residuals of K iterates, (2, b) each, as one block (2, K, b)."""
    measured = [row for row in rows if row is not None]
    return measured[0].unsqueeze(1) if len(measured) == 1 else torch.stack(measured, dim=1)


class ResidualHistory:
    """$|g|$ and $|f(z)|$ of every iterate, as blocks of rows on the device.

    Args:
        problem: its `scale` and its norm divide the residuals.
    """

    def __init__(self, problem: Problem) -> None:
        z0, stop = problem.z0, problem.stop
        self.dtype = numbers.norm_dtype(z0.dtype)
        self.nfe: list[int] = []  # evaluations up to each iterate
        self.scale = problem.scale  # (b,) divisors
        if stop.norm == "rms":
            root = z0.new_full(z0.shape[:1], stop.length(z0.shape[1]), dtype=self.dtype)
            self.scale = root if self.scale is None else root * self.scale
        self._blocks: list[Tensor] = []  # (2, K, b) each, unscaled
        self._empty = z0.new_empty(2, 0, len(z0), dtype=self.dtype)
        # Set once samples have left the batch:
        self.rows: Tensor | None = None  # (b,) the samples that are still in the batch
        self._earlier: Tensor | None = None  # (2, N, B) the residuals until then, scaled

    def append(self, block: Tensor) -> None:
        """Append unscaled residuals, (2, K, b)."""
        self._blocks.append(block)

    def whole(self) -> Tensor:
        """Return $|g|$ and $|f(z)|$ of the whole batch so far, (2, N, B), scaled.

        Samples that have left the batch keep their last values.
        """
        if not self._blocks:
            return self._empty if self._earlier is None else self._earlier
        new = torch.cat(self._blocks, dim=1).to(self.dtype)
        if self.scale is not None:
            new = new / self.scale
        if self._earlier is None or self.rows is None:
            return new
        last = self._earlier[:, -1:].expand(-1, new.shape[1], -1)
        return torch.cat((self._earlier, last.index_copy(2, self.rows, new)), dim=1)

    def keep(self, rows: Tensor) -> None:
        """Record only some of the samples from now on."""
        self._earlier, self._blocks = self.whole(), []
        self.rows = rows if self.rows is None else self.rows[rows]
        self.scale = None if self.scale is None else self.scale[rows]
