"""Puzzles as people write them: text to tokens and back, and a check before a model sees them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from deq_zoo.errors import ZooError
from deq_zoo.reason.boards import BOARDS, Board, TooHard, conflict, find_solutions
from deq_zoo.reason.config import ReasonConfig
from deq_zoo.reason.consistency import puzzle_kind
from deq_zoo.reason.mazes import CHARACTERS, FREE, GOAL, PATH, START, WALL, solve_maze

_BLANKS, _IGNORED = ".0_*?", " \t\r\n|+-"
_MOST_GUESSES = 20_000  # of the check; about a second


def puzzle_facts(net: ReasonConfig, labels: Tensor | None = None) -> dict[str, Any]:
    """Return the kind of puzzles that a network is for, for `Task.facts`; see `puzzle_kind`."""
    kind, side = puzzle_kind(net.cells, net.vocab, labels)
    return {"puzzle": kind, "side": side}


@dataclass(frozen=True)
class Checked:
    """A puzzle that can be solved.

    Args:
        tokens: the question.
        solutions: answers that the solver of the zoo has found, two at most; none if the search was
            too long.
        moves: of a maze's shortest path; 0 for a Sudoku.
    """

    tokens: tuple[int, ...]
    solutions: tuple[tuple[int, ...], ...] = ()
    moves: int = 0

    @property
    def ambiguous(self) -> bool:
        """Return whether there is more than one answer."""
        return len(self.solutions) > 1


class Puzzle:
    """Sudokus or mazes of one size, as text and as tokens.

    Args:
        facts: of a model; see `puzzle_facts`.
    """

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self.kind, self.side = facts.get("puzzle", "tokens"), int(facts.get("side", 0))
        if self.kind not in ("sudoku", "maze") or self.side < 1:
            raise ZooError(
                "the model does not know which puzzles it is for: call it with a batch of tokens"
            )

    @property
    def board(self) -> Board:
        """Return the board of Sudokus."""
        return BOARDS[self.side]

    def read(self, text: str) -> list[tuple[int, ...]]:
        """Return the tokens of all puzzles in a text; raise `ZooError` for anything else.

        A Sudoku is written row by row, with dots or zeros for blank cells; spaces, lines and frames
        are left out. Several Sudokus have a line each. Mazes have a line for each row, and blank
        lines between them; a blank line is a row of free cells where the number of rows says so.
        """
        return self._read_sudokus(text) if self.kind == "sudoku" else self._read_mazes(text)

    def _read_sudokus(self, text: str) -> list[tuple[int, ...]]:
        n = self.side
        lines = ["".join(c for c in line if c not in _IGNORED) for line in text.splitlines()]
        lines = [line for line in lines if line]
        if lines and all(len(line) == n * n for line in lines):
            return [self._encode(line) for line in lines]
        joined = "".join(lines)
        tokens = self._encode(joined)
        if len(joined) != n * n:
            raise ZooError(
                f"a Sudoku of {n}x{n} has {n * n} cells, got {len(joined)}: write digits, and dots "
                "for blank cells"
            )
        return [tokens]

    def _encode(self, cells: str) -> tuple[int, ...]:
        tokens = {str(d): d + 1 for d in range(1, self.side + 1)} | dict.fromkeys(_BLANKS, 1)
        for place, character in enumerate(cells):
            if character not in tokens:
                raise ZooError(
                    f"cell {place + 1} is {character!r}: this model solves Sudokus of "
                    f"{self.side}x{self.side}, with digits from 1 to {self.side}, and dots for "
                    "blank cells"
                )
        return tuple(tokens[character] for character in cells)

    def _read_mazes(self, text: str) -> list[tuple[int, ...]]:
        lines = text.splitlines()
        blocks = _blocks(lines, lambda line: not line.strip())
        if any(len(block) != self.side for block in blocks):
            # A row of free cells alone looks blank, and editors may have dropped its spaces.
            by_empty = _blocks(lines, lambda line: not line)
            for others in (by_empty, _chunks(lines, self.side)):
                if all(len(block) == self.side for block in others):
                    blocks = others
                    break
        mazes = [self.read_maze(block) for block in blocks]
        if not mazes:
            raise ZooError("there is no maze in the text")
        return mazes

    def read_maze(self, lines: Sequence[str]) -> tuple[int, ...]:
        """Return the tokens of one maze.

        Spaces at the end of a row do not matter: a column of free cells may be missing.
        """
        n, rows = self.side, [line.rstrip() for line in lines]
        widest = max(map(len, rows))
        if len(rows) != n or not n - 1 <= widest <= n:
            raise ZooError(
                f"expected a maze of {n}x{n} cells, got {len(rows)} rows of up to {widest}"
            )
        allowed = CHARACTERS[:4]
        joined = "".join(row.ljust(n) for row in rows)
        unknown = sorted(set(joined) - set(allowed))
        if unknown:
            raise ZooError(
                f"a maze is written with # for walls, spaces, S and G, got {unknown[0]!r}"
            )
        tokens = tuple(CHARACTERS.index(c) + 1 for c in joined)
        _check_ends(tokens)
        return tokens

    def check(self, tokens: Sequence[int]) -> Checked:
        """Return a puzzle with its solutions; raise `ZooError` if there is none."""
        if self.kind == "maze":
            return self._check_maze(tokens)
        digits, n = [token - 1 for token in tokens], self.side
        clash = conflict(self.board, digits)
        if clash is not None:
            (a, b), digit = clash, digits[clash[0]]
            raise ZooError(
                f"the Sudoku is impossible: {digit} is in row {a // n + 1}, column {a % n + 1} and "
                f"in row {b // n + 1}, column {b % n + 1}"
            )
        try:
            solutions = find_solutions(self.board, digits, _MOST_GUESSES)
        except TooHard:
            return Checked(tuple(tokens))
        if not solutions:
            raise ZooError("the Sudoku is impossible: no digits for the blank cells fit the givens")
        return Checked(tuple(tokens), tuple(tuple(d + 1 for d in grid) for grid in solutions))

    def _check_maze(self, tokens: Sequence[int]) -> Checked:
        _check_ends(tokens)
        question = np.array(tokens, dtype=np.uint8).reshape(self.side, self.side)
        solution = solve_maze(question)
        if solution is None:
            raise ZooError("the maze is impossible: no way leads from S to G")
        answer = tuple(int(token) for token in solution.answer.ravel())
        answers = (answer,) if solution.unique else (answer, tuple(tokens))
        return Checked(tuple(tokens), answers, solution.moves)

    def obeys(self, tokens: Sequence[int], answer: Sequence[int]) -> bool:
        """Return whether an answer keeps the givens and obeys all rules."""
        if self.kind == "maze":
            return self._is_path(tokens, answer)
        kept = all(q in (1, a) for q, a in zip(tokens, answer, strict=True))
        digits = [token - 1 for token in answer]
        complete = all(1 <= digit <= self.side for digit in digits)
        return kept and complete and conflict(self.board, digits) is None

    def _is_path(self, tokens: Sequence[int], answer: Sequence[int]) -> bool:
        """Return whether the marked cells are a shortest way from start to goal."""
        kept = all(a in (q, PATH) for q, a in zip(tokens, answer, strict=True))
        path = np.array([a == PATH for a in answer]).reshape(self.side, self.side)
        maze = np.array(tokens, dtype=np.uint8).reshape(self.side, self.side)
        if not kept or bool((path & (maze != FREE)).any()):
            return False
        only = np.where(path | (maze == START) | (maze == GOAL), maze, WALL).astype(np.uint8)
        way, shortest = solve_maze(only), solve_maze(maze)
        if way is None or shortest is None:
            return False
        return way.moves == shortest.moves == int(path.sum()) + 1

    def write(self, tokens: Sequence[int]) -> str:
        """Return a question or an answer as lines of text."""
        n = self.side
        characters = "".join(map(self.character, tokens))
        return "\n".join(characters[k : k + n] for k in range(0, n * n, n))

    def character(self, token: int) -> str:
        """Return the character of one cell; `?` for padding."""
        if self.kind == "maze":
            return f"?{CHARACTERS}"[token]
        return "?" if not token else "." if token == 1 else str(token - 1)


class Question(NamedTuple):
    """A puzzle that was read, not yet checked, and how to check and write it."""

    puzzle: Puzzle
    tokens: tuple[int, ...]


def read_questions(text: str, puzzle: Puzzle, any_side: bool = False) -> list[Question]:
    """Return all puzzles in a text; raise `ZooError` for anything else.

    Args:
        text: see `Puzzle.read`.
        puzzle: the puzzles of a model.
        any_side: whether the model takes mazes of any side; blank lines separate these.
    """
    try:
        return [Question(puzzle, tokens) for tokens in puzzle.read(text)]
    except ZooError:
        blocks = _blocks(text.splitlines(), lambda line: not line.strip())
        if not any_side or not blocks:
            raise
    by_rows = [(Puzzle({"puzzle": "maze", "side": len(block)}), block) for block in blocks]
    return [Question(each, each.read_maze(block)) for each, block in by_rows]


def _check_ends(maze: Sequence[int]) -> None:
    """Raise `ZooError` unless a maze has one start and one goal."""
    starts, goals = (list(maze).count(token) for token in (START, GOAL))
    if (starts, goals) != (1, 1):
        raise ZooError(f"a maze has one start S and one goal G, got {starts} and {goals}")


def _blocks(lines: Sequence[str], separates: Callable[[str], bool]) -> list[list[str]]:
    """Return the lines between those that separate mazes."""
    groups = groupby(lines, separates)
    return [list(group) for is_separator, group in groups if not is_separator]


def _chunks(lines: Sequence[str], rows: int) -> list[list[str]]:
    """Return mazes of so many rows each, with or without a blank line between them."""
    chunks, k = [], 0
    while k < len(lines):
        chunks.append(list(lines[k : k + rows]))
        k += rows
        if k < len(lines) and not lines[k].strip() and (len(lines) - k) % rows:
            k += 1
    return chunks
