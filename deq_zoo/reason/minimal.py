"""Minimal puzzles within a Sudoku of four digits, by the boards that differ from its solution."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
from numpy.typing import NDArray

from deq_zoo.reason.boards import Board, Grid, all_solutions


def minimal_puzzles(board: Board, question: Grid, grid: Grid) -> Iterator[Grid]:
    """Yield every puzzle within another that has the same one solution, and no given too many.

    Givens exclude another solved board if they have a cell in which it differs from the solution.
    So minimal puzzles are the smallest sets of cells that meet all these differences.

    Args:
        board: of four digits, with 288 solved boards; others have too many.
        question: with one solution.
        grid: the solution.
    """
    givens = sum(1 << cell for cell, digit in enumerate(question) if digit)
    differences = {mask & givens for mask in _differences(board, grid)}
    pending, seen = [givens], {givens}
    while pending:
        cells = pending.pop()
        fewer = [cells & ~(1 << k) for k in range(board.cells) if cells >> k & 1]
        proper = [each for each in fewer if all(each & mask for mask in differences)]
        if not proper:
            yield tuple(digit if cells >> k & 1 else 0 for k, digit in enumerate(question))
        pending += [each for each in proper if each not in seen]
        seen.update(proper)


def _differences(board: Board, grid: Grid) -> list[int]:
    """Return, as bit masks, the cells in which each other solved board differs."""
    differs = _all_grids(board) != np.array(grid)
    masks: list[int] = (differs @ (1 << np.arange(board.cells))).tolist()
    return [mask for mask in masks if mask]


@cache
def _all_grids(board: Board) -> NDArray[np.int64]:
    return np.array(list(all_solutions(board, [0] * board.cells)))
