"""Checks of puzzles from files: an answer keeps the givens and obeys the rules."""

from __future__ import annotations

from collections.abc import Callable
from math import isqrt
from typing import NamedTuple

import torch
from torch import Tensor

from deq_zoo.reason.boards import BOARDS, Board, all_units
from deq_zoo.reason.loss import IGNORED
from deq_zoo.reason.mazes import CHARACTERS, FREE, GOAL, PATH, START

_BLANK = 1  # the token of a blank cell of a Sudoku
_ROWS = 1 << 14  # that are checked at a time


#: Returns flags (N,) of wrong puzzles by what is wrong with them.
Examine = Callable[[Tensor, Tensor], dict[str, Tensor]]


class Fault(NamedTuple):
    """The first puzzle that is wrong, and what is wrong with it."""

    row: int
    reason: str


def find_sudoku_fault(board: Board, tokens: Tensor, labels: Tensor) -> Fault | None:
    """Return the first Sudoku whose answer cannot be right; None if there is none.

    Args:
        board: of all.
        tokens: (N, cells), the questions; 0 is padding.
        labels: (N, cells), the answers; the rules are checked where every cell is scored.
    """
    units = torch.tensor(all_units(board))
    every = sum(1 << (digit + 1) for digit in range(1, board.side + 1))

    def examine(question: Tensor, answer: Tensor) -> dict[str, Tensor]:
        scored = answer != IGNORED
        given = (question > _BLANK) & scored
        digits = torch.where(scored, answer, 0)
        seen = (1 << digits[:, units]).sum(-1)  # of each unit, digits twice give another sum
        return {
            "the answer changes a given": ((question != answer) & given).any(1),
            "the answer breaks the rules": (seen != every).any(1) & scored.all(1),
        }

    return _find_fault(examine, tokens, labels)


def find_maze_fault(side: int, tokens: Tensor, labels: Tensor) -> Fault | None:
    """Return the first maze whose path cannot be a shortest one; None if there is none.

    A shortest path has no branch: start and goal have one neighbour on it, other cells have two.

    Args:
        side: cells of a row.
        tokens: (N, cells), the questions.
        labels: (N, cells), the answers; paths are checked where every cell is scored.
    """

    def examine(question: Tensor, answer: Tensor) -> dict[str, Tensor]:
        scored = answer != IGNORED
        whole = scored.all(1)
        path = answer == PATH
        kept = (question == answer) | (path & (question == FREE)) | ~scored
        ends = (answer == START) | (answer == GOAL)
        on_way = (path | ends).view(-1, side, side).long()
        around = torch.zeros_like(on_way)
        around[:, 1:] += on_way[:, :-1]
        around[:, :-1] += on_way[:, 1:]
        around[:, :, 1:] += on_way[:, :, :-1]
        around[:, :, :-1] += on_way[:, :, 1:]
        near = around.flatten(1)
        broken = ((near != 2) & path) | ((near != 1) & ends)
        single = ((question == START).sum(1) == 1) & ((question == GOAL).sum(1) == 1)
        return {
            "a maze has one start S and one goal G": ~single & (question != 0).any(1),
            "the answer changes a cell that is not free": ~kept.all(1),
            "the answer is no shortest path from S to G": broken.any(1) & whole,
        }

    return _find_fault(examine, tokens, labels)


def find_fault(kind: str, side: int, tokens: Tensor, labels: Tensor) -> Fault | None:
    """Return the first puzzle whose answer cannot be right; see `puzzle_kind` for the kinds."""
    if kind == "sudoku":
        return find_sudoku_fault(BOARDS[side], tokens, labels)
    return find_maze_fault(side, tokens, labels) if kind == "maze" else None


def puzzle_kind(cells: int, vocab: int, labels: Tensor | None = None) -> tuple[str, int]:
    """Return `sudoku`, `maze` or `tokens` for other puzzles, and the side of the board.

    The kind follows from the shape, but for boards of 4x4, which Sudokus and mazes both have.

    Args:
        cells: of a puzzle.
        vocab: tokens.
        labels: (N, cells), answers that decide; without any, a board of 4x4 is a Sudoku.
    """
    side = isqrt(cells)
    if side**2 != cells:
        return "tokens", 0
    is_maze = vocab == len(CHARACTERS) + 1
    if side in BOARDS and vocab == side + 2:
        # An answer to a maze has one start, a solved board has every token as often as it has rows.
        if is_maze and labels is not None and bool(((labels == START).sum(1) == 1).all()):
            return "maze", side
        return "sudoku", side
    return ("maze", side) if is_maze else ("tokens", 0)


def _find_fault(examine: Examine, tokens: Tensor, labels: Tensor) -> Fault | None:
    """Return the first row for which one of the flags of `examine` is set."""
    first = 0
    for question, answer in zip(tokens.split(_ROWS), labels.split(_ROWS), strict=True):
        flags = examine(question.long(), answer.long())
        wrong = torch.stack(list(flags.values()))
        rows = wrong.any(0).nonzero()
        if len(rows):
            row = int(rows[0])
            reason = next(text for text, flag in flags.items() if bool(flag[row]))
            return Fault(first + row, reason)
        first += len(question)
    return None
