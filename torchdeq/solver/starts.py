"""Starts: at which step each sample began, for memories whose samples begin at different steps."""

from __future__ import annotations

from torch import Tensor


class Starts:
    """The number of the first entry of each sample in a memory, on the host.

    Until `put` is called, all samples began with entry 0, and nothing is stored for each of them.
    """

    def __init__(self, by_row: list[int] | None = None) -> None:
        self._by_row = by_row
        self.first = 0  # the smallest of them

    @property
    def differ(self) -> bool:
        """Return whether samples may have begun at different entries."""
        return self._by_row is not None

    def put(self, rows: list[int], batch: int, start: int) -> None:
        """Set the first entry of some of the samples."""
        if self._by_row is None:
            self._by_row = [0] * batch
        for row in rows:
            self._by_row[row] = start
        self.first = min(self._by_row)

    def take(self, rows: Tensor) -> Starts:
        """Return the starts of some of the samples; reads `rows` only if starts differ."""
        if self._by_row is None:
            return Starts()
        part = Starts([self._by_row[row] for row in rows.tolist()])
        part.first = min(part._by_row or [0])
        return part

    def shift(self, by: int) -> None:
        """Subtract a number from all starts: entries before it were removed from the memory."""
        self._by_row = [start - by for start in self._by_row or []]
        self.first -= by

    def older_than(self, entry: int, age: int) -> list[int]:
        """Return the samples that have at least `age` entries before `entry`."""
        return [row for row, start in enumerate(self._by_row or []) if entry - start >= age]

    def at_multiple(self, entry: int, period: int) -> list[int]:
        """Return the samples whose number of entries before `entry` is a multiple of `period`."""
        return [row for row, start in enumerate(self._by_row or []) if not (entry - start) % period]
