"""Sudoku boards of any box, and a solver that counts solutions and guesses."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice

Grid = tuple[int, ...]  # row by row, 0 for a blank cell


class TooHard(ValueError):
    """The error of a search that has tried more guesses than it may."""


@dataclass(frozen=True)
class Board:
    """A Sudoku board: rows, columns and boxes hold every digit once.

    Args:
        box_rows: rows of a box.
        box_columns: columns of a box.
    """

    box_rows: int
    box_columns: int

    @property
    def side(self) -> int:
        """Return the cells of a row, which is the number of digits."""
        return self.box_rows * self.box_columns

    @property
    def cells(self) -> int:
        """Return the number of cells."""
        return self.side**2

    @property
    def square(self) -> bool:
        """Return whether transposing the board keeps its boxes."""
        return self.box_rows == self.box_columns


BOARDS = {4: Board(2, 2), 6: Board(2, 3), 9: Board(3, 3)}


@cache
def _units(board: Board) -> tuple[list[tuple[tuple[int, ...], ...]], list[tuple[int, ...]]]:
    """Return the three units of each cell, and the other cells of these units."""
    n, r, c = board.side, board.box_rows, board.box_columns
    rows = [tuple(n * i + j for j in range(n)) for i in range(n)]
    columns = [tuple(n * i + j for i in range(n)) for j in range(n)]
    boxes = [
        tuple(n * (r * a + i) + c * b + j for i in range(r) for j in range(c))
        for a in range(n // r)
        for b in range(n // c)
    ]
    units = [tuple(u for u in (*rows, *columns, *boxes) if cell in u) for cell in range(n * n)]
    peers = [tuple(sorted({p for u in own for p in u} - {k})) for k, own in enumerate(units)]
    return units, peers


@cache
def all_units(board: Board) -> list[tuple[int, ...]]:
    """Return the cells of each row, column and box."""
    units, _ = _units(board)
    return sorted({unit for own in units for unit in own})


class _Search:
    """A search by propagation and guesses.

    A state is a list of bit masks, the digits that each cell may still have. A cell with one digit
    forbids it to its peers; a digit with one place in a unit takes it.
    """

    def __init__(
        self, board: Board, rng: random.Random | None = None, most_guesses: int | None = None
    ) -> None:
        self.board, self.rng, self.most = board, rng, most_guesses
        self.units, self.peers = _units(board)
        self.guesses = 0

    def start(self, question: Sequence[int]) -> list[int] | None:
        """Return the state after all givens; None if they contradict each other."""
        whole = (1 << self.board.side) - 1
        given = [1 << digit >> 1 for digit in question]  # 0 for a blank cell
        masks = []
        for cell, bit in enumerate(given):
            taken = 0
            for peer in self.peers[cell]:
                taken |= given[peer]
            mask = (bit or whole) & ~taken
            if not mask:
                return None
            masks.append(mask)
        return masks if self._take_singles(masks, given) else None

    def _take_singles(self, masks: list[int], given: list[int]) -> bool:
        """Follow the consequences of the givens; return False for a contradiction."""
        for cell, bit in enumerate(given):
            if not bit and not masks[cell] & (masks[cell] - 1):
                for peer in self.peers[cell]:
                    if not self.forbid(masks, peer, masks[cell]):
                        return False
        for unit in all_units(self.board):
            once = twice = 0
            for cell in unit:
                twice |= once & masks[cell]
                once |= masks[cell]
            for cell in unit:
                bit = masks[cell] & once & ~twice
                if bit and masks[cell] != bit and not self.assign(masks, cell, bit):
                    return False
        return True

    def assign(self, masks: list[int], cell: int, bit: int) -> bool:
        """Give a cell a digit; return False for a contradiction."""
        if not masks[cell] & bit or bit & (bit - 1):  # taken, or two digits with one place
            return False
        return self.forbid(masks, cell, masks[cell] & ~bit)

    def forbid(self, masks: list[int], cell: int, bits: int) -> bool:
        """Forbid digits to a cell and follow the consequences; return False for a contradiction."""
        pending = [(cell, bits)]
        while pending:
            cell, bits = pending.pop()
            bits &= masks[cell]
            if not bits:
                continue
            left = masks[cell] & ~bits
            if not left:
                return False
            masks[cell] = left
            if not left & (left - 1):  # a single digit
                pending += [(peer, left) for peer in self.peers[cell] if masks[peer] & left]
            for unit in self.units[cell]:
                once = twice = 0
                for other in unit:
                    twice |= once & masks[other]
                    once |= masks[other]
                if bits & ~once:
                    return False
                alone = bits & once & ~twice
                if alone:
                    for other in unit:
                        bit = masks[other] & alone
                        if bit and masks[other] != bit:
                            if bit & (bit - 1):  # two digits with one place
                                return False
                            pending.append((other, masks[other] & ~bit))
        return True

    def guess(self) -> None:
        """Count a guess; raise `TooHard` if there are too many."""
        self.guesses += 1
        if self.most is not None and self.guesses > self.most:
            raise TooHard(f"no result after {self.most} guesses")

    def solutions(self, masks: list[int]) -> Iterator[list[int]]:
        """Yield all solutions as masks of one digit."""
        sizes = [(mask.bit_count(), cell) for cell, mask in enumerate(masks) if mask & (mask - 1)]
        if not sizes:
            yield masks
            return
        fewest = min(sizes)[0]
        choices = [cell for size, cell in sizes if size == fewest]
        cell = choices[0] if self.rng is None else self.rng.choice(choices)
        bits = [1 << k for k in range(self.board.side) if masks[cell] >> k & 1]
        if self.rng is not None:
            self.rng.shuffle(bits)
        for bit in bits:
            self.guess()
            tried = masks.copy()
            if self.assign(tried, cell, bit):
                yield from self.solutions(tried)


class _NarrowSearch(_Search):
    """A search that guesses where fewest guesses are possible: a cell, or a digit of a unit.

    It needs far fewer guesses for boards with few givens, so their number is no measure of
    difficulty: ratings come from `_Search`.
    """

    def solutions(self, masks: list[int]) -> Iterator[list[int]]:
        """Yield all solutions as masks of one digit."""
        for cell, bit in self._narrowest(masks):
            self.guess()
            tried = masks.copy()
            if self.assign(tried, cell, bit):
                yield from self.solutions(tried)
        if all(not mask & (mask - 1) for mask in masks):
            yield masks

    def _narrowest(self, masks: list[int]) -> list[tuple[int, int]]:
        """Return the guesses of which one must be right: cells with bits; none if all is clear."""
        digits = [1 << k for k in range(self.board.side)]
        best: list[tuple[int, int]] = []
        for cell, mask in enumerate(masks):
            if mask & (mask - 1) and not 0 < len(best) <= mask.bit_count():
                best = [(cell, bit) for bit in digits if mask & bit]
        for unit in all_units(self.board):
            for bit in digits if len(best) > 2 else ():
                places = [(cell, bit) for cell in unit if masks[cell] & bit]
                if 1 < len(places) < len(best):
                    best = places
        return best


@dataclass(frozen=True)
class Solved:
    """The result of a search.

    Args:
        solutions: one for a proper puzzle, none for an impossible one, the first two of several.
        guesses: digits that the search tried without being forced to, until it was sure; 0 for a
            puzzle that follows by singles alone.
    """

    solutions: tuple[Grid, ...]
    guesses: int

    @property
    def unique(self) -> bool:
        """Return whether there is exactly one solution."""
        return len(self.solutions) == 1


def solve_board(board: Board, question: Sequence[int], most_guesses: int | None = None) -> Solved:
    """Return up to two solutions of a puzzle; raise `TooHard` after too many guesses.

    Args:
        board: its board.
        question: digits row by row, 0 for a blank cell.
        most_guesses: None for no limit.
    """
    search = _Search(board, most_guesses=most_guesses)
    masks, solutions = search.start(question), []
    if masks is not None:
        for solution in search.solutions(masks):
            solutions.append(tuple(mask.bit_length() for mask in solution))
            if len(solutions) == 2:
                break
    return Solved(tuple(solutions), search.guesses)


def find_solutions(board: Board, question: Sequence[int], most_guesses: int) -> tuple[Grid, ...]:
    """Return up to two solutions of a puzzle; raise `TooHard` after too many guesses.

    The search is faster than that of `solve_board`, and does not rate the puzzle.
    """
    search = _NarrowSearch(board, most_guesses=most_guesses)
    masks = search.start(question)
    if masks is None:
        return ()
    first_two = islice(search.solutions(masks), 2)
    return tuple(tuple(mask.bit_length() for mask in each) for each in first_two)


def all_solutions(board: Board, question: Sequence[int]) -> Iterator[Grid]:
    """Yield all solutions of a puzzle, however many there are."""
    search = _Search(board)
    masks = search.start(question)
    for solution in search.solutions(masks) if masks is not None else ():
        yield tuple(mask.bit_length() for mask in solution)


def draw_grid(board: Board, rng: random.Random) -> Grid:
    """Return a solved board drawn at random."""
    search = _Search(board, rng)
    masks = search.start([0] * board.cells)
    assert masks is not None
    return tuple(mask.bit_length() for mask in next(search.solutions(masks)))


def dig(board: Board, grid: Grid, rng: random.Random) -> Grid:
    """Return a minimal puzzle with the solution `grid` and no other: all its givens are needed.

    Args:
        board: its board.
        grid: the solution.
        rng: of the order in which givens are dropped.
    """
    question = list(grid)
    for cell in rng.sample(range(board.cells), board.cells):
        question[cell] = 0
        if _has_other(board, question, cell, grid[cell]):
            question[cell] = grid[cell]
    return tuple(question)


def add_givens(question: Grid, grid: Grid, rng: random.Random, count: int) -> Grid:
    """Return a puzzle with `count` more givens, drawn at random; all blanks if there are fewer."""
    blanks = [cell for cell, digit in enumerate(question) if not digit]
    more = set(rng.sample(blanks, min(count, len(blanks))))
    return tuple(grid[k] if k in more else digit for k, digit in enumerate(question))


def _has_other(board: Board, question: Sequence[int], cell: int, digit: int) -> bool:
    """Return whether a puzzle has a solution with another digit in a blank cell."""
    search = _Search(board)
    seen = {question[peer] for peer in search.peers[cell]}
    if len(seen - {0}) == board.side - 1:  # all other digits: no search is needed
        return False
    masks = search.start(question)
    if masks is None or not search.forbid(masks, cell, 1 << (digit - 1)):
        return False
    return next(search.solutions(masks), None) is not None


def conflict(board: Board, grid: Sequence[int]) -> tuple[int, int] | None:
    """Return two cells of one row, column or box with the same digit; None if there are none."""
    _, peers = _units(board)
    for cell, digit in enumerate(grid):
        for other in peers[cell]:
            if digit and cell < other and grid[other] == digit:
                return cell, other
    return None
