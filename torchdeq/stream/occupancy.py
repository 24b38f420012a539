"""The rows of a running batch: which sample each of them holds, and when idle rows leave it."""

from __future__ import annotations

from collections.abc import Container

_IDLE = 16  # checks for which a few rows may be idle before the batch shrinks
_BUSY = 0.8  # the fraction of busy rows below which the batch shrinks at once


class Occupancy:
    """The sample in each row, by its ticket; a row without a sample is idle.

    Methods that remove or add rows return, for each row of the new batch, the number of the row
    that it comes from. Whoever keeps values by row must take them over in this order.
    """

    def __init__(self) -> None:
        self.start([])

    def start(self, tickets: list[int]) -> None:
        """Begin with a sample in each row."""
        self._tickets: list[int | None] = list(tickets)
        self._idle: list[int] = []  # idle rows
        self._idle_checks = 0
        self._harmful = False  # whether an idle row may upset `f`

    def __len__(self) -> int:
        return len(self._tickets)

    @property
    def busy(self) -> int:
        """Return the number of rows that hold a sample."""
        return len(self._tickets) - len(self._idle)

    def ticket(self, row: int) -> int:
        """Return the ticket of the sample in a busy row."""
        ticket = self._tickets[row]
        assert ticket is not None, "the row is idle"
        return ticket

    def rows_of(self, tickets: Container[int]) -> list[int]:
        """Return the rows whose samples are among these tickets."""
        return [row for row in self._busy_rows() if self._tickets[row] in tickets]

    def occupy(self, tickets: list[int]) -> list[int]:
        """Give idle rows to new samples; return the row of each."""
        rows, self._idle = self._idle[: len(tickets)], self._idle[len(tickets) :]
        for row, ticket in zip(rows, tickets, strict=True):
            self._tickets[row] = ticket
        self._harmful = self._harmful and bool(self._idle)
        return rows

    def vacate(self, rows: list[int], harmful: bool = False) -> None:
        """Let rows be idle.

        Args:
            rows: rows whose samples have left.
            harmful: whether the state that one of them leaves behind may upset `f`.
        """
        for row in rows:
            self._tickets[row] = None
        self._idle += rows
        self._idle_checks = 0
        self._harmful |= harmful

    def pass_check(self) -> None:
        """Count a check at which no sample has left."""
        self._idle_checks += bool(self._idle)

    def shrink(self, entering: int) -> list[int] | None:
        """Remove idle rows that are many, have been idle for long or may upset `f`.

        Args:
            entering: idle rows to keep, because new samples are about to occupy them.

        Returns:
            The former number of each row that remains; None if all do.
        """
        spare = len(self._idle) - entering
        if spare <= 0:
            return None
        few = spare < (1 - _BUSY) * len(self._tickets)
        if few and self._idle_checks < _IDLE and not self._harmful:
            return None
        busy = self._busy_rows()
        rows = [*busy, *self._idle[:entering]]
        self._tickets = [self._tickets[row] for row in rows]
        self._idle = [*range(len(busy), len(rows))]
        self._idle_checks, self._harmful = 0, False
        return rows

    def grow(self, entering: int) -> list[int] | None:
        """Add idle rows until new samples have room.

        Args:
            entering: how many new samples there are.

        Returns:
            The former number of each row, that of a busy row for a new one; None if there is room.
        """
        more = entering - len(self._idle)
        if more <= 0:
            return None
        old = len(self._tickets)
        rows = [*range(old), *[self._busy_rows()[0]] * more]
        self._tickets += [None] * more
        self._idle += range(old, old + more)
        return rows

    def _busy_rows(self) -> list[int]:
        return [row for row, ticket in enumerate(self._tickets) if ticket is not None]
