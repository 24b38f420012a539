"""The best states so far: by reference while that is possible, in a buffer otherwise."""

from __future__ import annotations

import torch
from torch import Tensor

from torchdeq.solver.base import SMALL, Iterate


class BestStates:
    """The best state of each sample.

    The states of an iterate in which all samples improve are kept by reference: nothing is copied.
    Once only some samples improve, the states are in a tensor of this class, which later updates
    overwrite in place. An answer in a buffer of the solver is copied before the solver writes there
    again.

    Args:
        z0: (b, D) the start, which stays the state of samples that never improve.
    """

    def __init__(self, z0: Tensor) -> None:
        self.z = z0  # (b, D)
        self._owned = False  # whether no other object refers to `z`
        self._lasts: int | None = None  # steps for which `z` stays unchanged; None: for ever
        self._buffer: Tensor | None = None  # (b + 1, D): the states and a spare row
        self._index: Tensor | None = None  # (b + 1,) the numbers of its rows

    def adopt(self, it: Iterate, age: int = 0) -> None:
        """Take the answers of an iterate, `age` steps ago, in which all samples improved."""
        self.z, self._owned, self._buffer = it.answer, False, None
        self._lasts = None if it.fresh else it.lasts - age

    def replace_some(self, better: Tensor, it: Iterate) -> None:
        """Take the answers of an iterate for some samples, by flags (b,) on the host.

        Of large states, only the rows that change are read and written.
        """
        if self.z.numel() <= SMALL:
            self.z = torch.where(better.to(self.z.device)[:, None], it.answer, self.z)
        else:
            rows = better.nonzero().squeeze(1).to(self.z.device)
            copy = self.z.index_copy_ if self._owned else self.z.index_copy
            self.z = copy(0, rows, it.answer.index_select(0, rows))
        self._owned, self._lasts = True, None

    def choose(self, answers: list[Tensor], which: Tensor) -> None:
        """Take the answer of the given number for each sample, (b,); 0 keeps its state."""
        b = len(which)
        rows = torch.add(torch.arange(b, device=which.device), which, alpha=b)
        self.z = torch.cat((self.z, *answers)).index_select(0, rows)
        self._owned, self._lasts, self._buffer = True, None, None

    def replace_where(self, better: Tensor, answer: Tensor) -> None:
        """Replace the states of some samples, by flags (b,) on the device.

        Rows that are not better are copied into a spare row: this takes two thirds of the time of
        `torch.where` with a broadcast mask, and the host reads no row numbers.
        """
        b = len(better)
        if self._buffer is None:
            self._buffer = self.z.new_empty(b + 1, answer.shape[1])
            self._buffer[:b] = self.z
            self._index = torch.arange(b + 1, device=self.z.device)
        assert self._index is not None
        rows = torch.where(better, self._index[:b], self._index[b])
        self._buffer.index_copy_(0, rows, answer)
        self.z, self._owned, self._lasts = self._buffer[:b], True, None

    def pass_step(self) -> None:
        """Count a step of the solver, which may overwrite its buffers later."""
        if self._lasts is not None:
            self._lasts -= 1

    def copy_expired(self) -> None:
        """Copy states in a buffer of the solver if its next step overwrites the buffer."""
        if self._lasts is not None and self._lasts <= 0:
            self.z, self._owned, self._lasts = self.z.clone(), True, None

    def snapshot(self) -> Tensor:
        """Return the states, (b, D), which later steps do not change."""
        if self._buffer is not None:
            return self.z.clone()
        if self._lasts is not None:
            self.z, self._lasts = self.z.clone(), None
        self._owned = False
        return self.z

    def keep(self, rows: Tensor) -> None:
        """Keep only some of the samples."""
        self.z, self._owned, self._lasts = self.z.index_select(0, rows), True, None
        self._buffer = None
