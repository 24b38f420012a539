"""Symmetries of Sudoku boards and mazes: orbits that are held out whole, and augmentation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import combinations, permutations, product
from math import isqrt
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deq_zoo.reason.boards import Board
from deq_zoo.reason.mazes import GOAL, START

Array = NDArray[np.int64]


class Symmetry(NamedTuple):
    """A change of a board that keeps its rules.

    Args:
        digits: the new digit of 0, 1, ...; 0, the blank, stays.
        transpose: whether rows and columns are exchanged first.
        rows: the old row of each new one.
        columns: the old column of each new one.
    """

    digits: Array
    transpose: bool
    rows: Array
    columns: Array

    def apply(self, grid: Array) -> Array:
        """Return a grid (side, side) of digits, changed."""
        grid = grid.T if self.transpose else grid
        return self.digits[grid[self.rows][:, self.columns]]


def draw_published(rng: Any, board: Board) -> Symmetry:
    """Draw a symmetry as the authors' programs do.

    Args:
        rng: a `numpy.random.RandomState`.
        board: a board of square boxes.
    """
    digits = np.concatenate(([0], rng.permutation(np.arange(1, board.side + 1))))
    transpose = bool(rng.rand() < 0.5)
    rows, columns = (_draw_lines(rng, board.box_rows, board.side) for _ in range(2))
    return Symmetry(digits, transpose, rows, columns)


def _draw_lines(rng: Any, size: int, side: int) -> Array:
    """Draw an order of lines that keeps bands of `size` together."""
    bands = rng.permutation(side // size)
    return np.concatenate([size * band + rng.permutation(size) for band in bands])


def augment(board: Board, grids: Sequence[Tensor], rng: torch.Generator) -> list[Tensor]:
    """Return boards (B, cells) of tokens, each changed by a random symmetry of its own.

    Args:
        board: their board.
        grids: e.g. questions and answers, which are changed alike. A token is a digit + 1; a
            negative label, of a cell that is not scored, moves with its cell.
        rng: of the symmetries.
    """
    n, b = board.side, len(grids[0])
    rows = _shuffled_lines(b, board.box_rows, n, rng)
    columns = _shuffled_lines(b, board.box_columns, n, rng)
    flipped = torch.rand(b, 1, 1, generator=rng) < (0.5 if board.square else -1.0)
    shuffled = torch.rand(b, n, generator=rng).argsort(1)
    blank = torch.tensor([[0, 1]]).expand(b, 2)  # padding and the blank cell
    digits = torch.cat((blank, shuffled + 2), dim=1)
    changed = []
    for tokens in grids:
        grid = tokens.view(b, n, n).long()
        grid = torch.where(flipped, grid.mT, grid)
        grid = grid.gather(1, rows[:, :, None].expand(b, n, n))
        grid = grid.gather(2, columns[:, None, :].expand(b, n, n))
        cells = grid.flatten(1)
        renamed = digits.gather(1, cells.clamp_min(0))
        changed.append(torch.where(cells < 0, cells, renamed).to(tokens.dtype))
    return changed


def _shuffled_lines(b: int, size: int, side: int, rng: torch.Generator) -> Tensor:
    """Return (b, side) random orders of lines that keep bands of `size` together."""
    bands = torch.rand(b, side // size, generator=rng).argsort(1)
    inner = torch.rand(b, side // size, size, generator=rng).argsort(2)
    return (size * bands[:, :, None] + inner).flatten(1)


def orbit(board: Board, grid: Sequence[int]) -> tuple[int, ...]:
    """Return a key that all boards of one orbit share.

    Boards of up to six digits: the least of all boards that symmetries make of it, so keys are
    equal for boards of one orbit only. Larger solved boards have too many symmetries: the key is
    the cycles by which two lines of a band are permutations of each other, which several orbits may
    share. Blank cells are allowed in the first case alone.
    """
    cells = np.asarray(grid, dtype=np.int64)
    if board.side > 6:
        return _cycle_key(board, cells)
    images = cells[_cell_orders(board)]  # (symmetries, cells)
    rows = _relabel(images, board.side).astype(np.uint8).tobytes()
    return tuple(min(rows[k : k + board.cells] for k in range(0, len(rows), board.cells)))


def maze_orbit(question: Sequence[int]) -> tuple[int, ...]:
    """Return a key that a maze shares with its images under the symmetries of the square.

    It is the least of these images, and of those with start and goal exchanged.
    """
    maze = np.asarray(question, dtype=np.uint8)
    maze = maze.reshape(isqrt(len(maze)), -1)
    swapped = np.where(maze == START, GOAL, np.where(maze == GOAL, START, maze)).astype(np.uint8)
    images = [np.rot90(each, k) for m in (maze, swapped) for each in (m, m.T) for k in range(4)]
    return tuple(min(np.ascontiguousarray(image).tobytes() for image in images))


@cache
def _cell_orders(board: Board) -> Array:
    """Return, for each symmetry of the places, the old cell of each new one."""
    n = board.side
    cells = np.arange(board.cells).reshape(n, n)
    rows, columns = _lines(board.box_rows, n), _lines(board.box_columns, n)
    sources = (cells, cells.T) if board.square else (cells,)
    return np.stack([source[r][:, c].ravel() for source in sources for r in rows for c in columns])


def _lines(size: int, side: int) -> list[list[int]]:
    """Return all orders of lines that keep bands of `size` together."""
    inner = list(permutations(range(size)))
    return [
        [size * band + k for band, order in zip(bands, orders, strict=True) for k in order]
        for bands in permutations(range(side // size))
        for orders in product(inner, repeat=side // size)
    ]


def _relabel(images: Array, digits: int) -> Array:
    """Return rows whose digits are numbered by their first appearance; 0 stays."""
    cells = images.shape[1]
    first = np.full((len(images), digits), cells, dtype=np.int64)
    for digit in range(1, digits + 1):
        there = images == digit
        first[:, digit - 1] = np.where(there.any(1), there.argmax(1), cells)
    rank = first.argsort(axis=1, kind="stable").argsort(axis=1, kind="stable") + 1
    names = np.concatenate((np.zeros((len(images), 1), dtype=np.int64), rank), axis=1)
    return np.take_along_axis(names, images, axis=1)


def _cycle_key(board: Board, cells: Array) -> tuple[int, ...]:
    """Return the lengths of cycles between the lines of each band, independent of their order."""
    if (cells == 0).any():
        raise ValueError("the orbit of a large board is that of its solution: got blank cells")
    grid = cells.reshape(board.side, board.side)
    sides = [_bands(grid, board.box_rows), _bands(grid.T, board.box_columns)]
    ordered = sorted(sides) if board.square else sides
    return tuple(number for side in ordered for band in side for pair in band for number in pair)


def _bands(grid: Array, size: int) -> list[list[tuple[int, ...]]]:
    bands = [grid[k : k + size] for k in range(0, len(grid), size)]
    return sorted(sorted(_cycles(a, b) for a, b in combinations(band, 2)) for band in bands)


def _cycles(a: Array, b: Array) -> tuple[int, ...]:
    """Return the sorted lengths of the cycles of the permutation from one line to another."""
    image = dict(zip(a.tolist(), b.tolist(), strict=True))
    lengths = []
    while image:
        digit, length = next(iter(image)), 0
        while digit in image:
            digit, length = image.pop(digit), length + 1
        lengths.append(length)
    return tuple(sorted(lengths))
