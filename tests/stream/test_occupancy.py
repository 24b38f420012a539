"""Which sample has which row, against a plain model of the same rules."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torchdeq.stream import occupancy
from torchdeq.stream.occupancy import Occupancy


@given(
    moves=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5), st.booleans()), max_size=40),
    start=st.integers(1, 6),
)
def test_every_ticket_keeps_its_values_whatever_enters_and_leaves(
    moves: list[tuple[int, int, bool]], start: int
) -> None:
    rows = Occupancy()
    rows.start(list(range(start)))
    values, held, next_ticket = list(range(start)), set(range(start)), start

    def take(order: list[int] | None) -> None:
        nonlocal values
        values = values if order is None else [values[row] for row in order]

    for entering, leaving, harmful in moves:
        take(rows.shrink(entering))
        if held and entering:
            take(rows.grow(entering))
            tickets = list(range(next_ticket, next_ticket + entering))
            for row, ticket in zip(rows.occupy(tickets), tickets, strict=True):
                values[row] = ticket
            held |= set(tickets)
            next_ticket += entering
        gone = set(sorted(held)[:leaving]) if len(held) > leaving else set()
        rows.vacate(rows.rows_of(gone), harmful)
        held -= gone
        assert rows.busy == len(held)
        assert len(rows) == len(values)
        for ticket in held:
            (row,) = rows.rows_of({ticket})
            assert rows.ticket(row) == values[row] == ticket


def test_a_few_idle_rows_leave_after_a_while_and_many_at_once() -> None:
    rows = Occupancy()
    rows.start(list(range(20)))
    rows.vacate([3])
    waits = 0
    while (order := rows.shrink(0)) is None:
        rows.pass_check()
        waits += 1
    assert waits == occupancy._IDLE
    assert order == [row for row in range(20) if row != 3]
    rows.vacate([0, 1, 2, 4])
    assert rows.shrink(0) == [3, *range(5, 19)]


def test_an_idle_row_that_may_upset_f_leaves_at_once_unless_a_sample_takes_it() -> None:
    rows = Occupancy()
    rows.start(list(range(20)))
    rows.vacate([7], harmful=True)
    assert rows.occupy([20]) == [7]
    rows.vacate([8])
    assert rows.shrink(0) is None
    rows.vacate([9], harmful=True)
    assert rows.shrink(0) == [*range(8), *range(10, 20)]


def test_new_rows_are_copies_of_busy_ones() -> None:
    rows = Occupancy()
    rows.start([10, 11, 12])
    rows.vacate([0])
    assert rows.grow(1) is None
    assert rows.grow(3) == [0, 1, 2, 1, 1]
    assert rows.occupy([20, 21, 22]) == [0, 3, 4]
    assert [rows.ticket(row) for row in range(5)] == [20, 11, 12, 21, 22]
