"""Sets of puzzles: made by a generator, with whole orbits held out, and kept by their seed."""

from __future__ import annotations

import hashlib
import logging
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from deq_zoo.errors import DataError
from deq_zoo.files import write_atomically
from deq_zoo.reason.boards import BOARDS, Board, Grid, add_givens, dig, draw_grid, solve_board
from deq_zoo.reason.mazes import PATH, NoMaze, draw_mazes
from deq_zoo.reason.minimal import minimal_puzzles
from deq_zoo.reason.symmetry import maze_orbit, orbit

CACHE = "DEQ_ZOO_CACHE"  # the variable that names the folder of generated sets
VERSION = 2  # of the generators: raise it when they draw other puzzles, or split them otherwise
# Of the hash that deals orbits out. Boards of six digits have 49 orbits, minimal puzzles of four
# digits 36: with this salt val, test and train get 5, 10 and 34 of the first (12, 20 and 68 % of
# all boards), and 4, 7 and 25 of the second (12, 24 and 64 % of the puzzles drawn).
_SALT = 1501
_SLOW = 2.0  # seconds from which a generated set is worth keeping
_PATIENCE = 400  # draws for each puzzle that a split still lacks
_log = logging.getLogger("deq_zoo")


@dataclass(frozen=True, eq=False)
class PuzzleSet:
    """Puzzles with their answers.

    Args:
        tokens: (N, L) bytes, the questions.
        labels: (N, L), the answers.
        ids: (N,), the row of each puzzle's own vector.
        rating: (N,), guesses of the solver or moves of the path.
        groups: (G + 1,), where each group of variants of one puzzle begins.
    """

    tokens: Tensor
    labels: Tensor
    ids: Tensor
    rating: Tensor
    groups: Tensor

    @classmethod
    def of(cls, tokens: Tensor, labels: Tensor, rating: Tensor | None = None) -> PuzzleSet:
        """Return puzzles of which each is a group of its own."""
        n = len(tokens)
        zeros = torch.zeros(n, dtype=torch.long)
        rating = zeros if rating is None else rating
        return cls(tokens, labels, zeros, rating, torch.arange(n + 1))

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, rows: Tensor) -> PuzzleSet:
        """Return some of the puzzles, each as a group of its own."""
        taken = PuzzleSet.of(self.tokens[rows], self.labels[rows], self.rating[rows])
        return PuzzleSet(taken.tokens, taken.labels, self.ids[rows], taken.rating, taken.groups)


class Splits(NamedTuple):
    """Puzzles for training, for choosing the best checkpoint, and for the test."""

    train: PuzzleSet
    val: PuzzleSet
    test: PuzzleSet


class Sizes(NamedTuple):
    """Puzzles of each split."""

    train: int
    val: int
    test: int


def make_sudokus(
    side: int, sizes: Sizes, seed: int, extra: int = 0, min_guesses: int = 0
) -> Splits:
    """Return Sudokus with one solution each; no orbit is in two splits.

    The split of an orbit depends on the orbit alone, so sets of other seeds and sizes keep it. The
    orbits are those of solved boards, of which there are 49 with six digits. With four digits
    there are only two: there, the orbits are those of minimal puzzles, from which no given can be
    dropped, and every minimal puzzle within a puzzle is of the same split.

    Args:
        side: 4, 6 or 9 digits.
        sizes: puzzles of each split.
        seed: of all draws.
        extra: givens beyond those that are necessary, up to this number, drawn at random.
        min_guesses: the least difficulty.
    """
    board = BOARDS[side]
    name = f"sudoku{side}-{'-'.join(map(str, sizes))}-{seed}-{extra}-{min_guesses}"
    draw = partial(_draw_sudoku, board, seed, extra, min_guesses)
    return _kept(name, lambda: _fill(sizes, board.cells, draw))


def make_mazes(side: int, lengths: tuple[int, int], sizes: Sizes, seed: int) -> Splits:
    """Return mazes with one path each; no orbit is in two splits.

    The orbit of a maze has its images under the symmetries of the square, and the same with start
    and goal exchanged. The split depends on the orbit alone, as for Sudokus.

    Args:
        side: cells of a row, walls included.
        lengths: the shortest and the longest path, in moves.
        sizes: puzzles of each split.
        seed: of all draws.
    """

    def make() -> Splits:
        source = draw_mazes(side, lengths, np.random.default_rng(seed), set())

        def draw(number: int, needed: Needed) -> _Drawn:
            question, answer = (tokens.ravel().tolist() for tokens in next(source))
            split = split_of(maze_orbit(question))
            return _Drawn(tuple(question), tuple(answer), answer.count(PATH) + 1, split)

        try:
            return _fill(sizes, side**2, draw)
        except NoMaze as error:
            raise DataError(str(error)) from None

    name = f"maze{side}-{lengths[0]}-{lengths[1]}-{'-'.join(map(str, sizes))}-{seed}"
    return _kept(name, make)


Needed = Callable[[str], bool]  # whether a split still needs puzzles


class _Drawn(NamedTuple):
    """The tokens of a puzzle and of its solution, its difficulty and its split."""

    question: tuple[int, ...]
    answer: tuple[int, ...]
    rating: int
    split: str


def _draw_sudoku(
    board: Board, seed: int, extra: int, min_guesses: int, number: int, needed: Needed
) -> _Drawn | None:
    """Draw a puzzle that depends on the seed and its number; None if it is not needed."""
    rng = random.Random(f"sudoku {board.side} {seed} {number}")
    grid = draw_grid(board, rng)
    split = None if board.side == 4 else split_of(orbit(board, grid))
    if split is not None and not needed(split):  # digging takes far longer than drawing
        return None
    question = add_givens(dig(board, grid, rng), grid, rng, rng.randint(0, extra))
    if split is None:
        split = _common_split(board, question, grid)
        if split is None or not needed(split):
            return None
    guesses = solve_board(board, question).guesses
    if guesses < min_guesses:
        return None
    tokens, labels = (tuple(digit + 1 for digit in digits) for digits in (question, grid))
    return _Drawn(tokens, labels, guesses, split)


def _common_split(board: Board, question: Grid, grid: Grid) -> str | None:
    """Return the split of all minimal puzzles within a puzzle; None if they differ."""
    first = None
    for each in minimal_puzzles(board, question, grid):
        split = split_of(orbit(board, each))
        first = first or split
        if split != first:
            return None
    return first


def split_of(key: tuple[int, ...]) -> str:
    """Return the split of an orbit: one in ten to val, two in ten to test, the rest to train."""
    salt = _SALT.to_bytes(2, "little")
    digest = hashlib.blake2b(repr(key).encode(), digest_size=4, salt=salt).digest()
    share = int.from_bytes(digest, "little") % 10
    return ("val", "test", "test")[share] if share < 3 else "train"


def _fill(sizes: Sizes, cells: int, draw: Callable[[int, Needed], _Drawn | None]) -> Splits:
    """Deal puzzles out until every split is full; no question comes twice in a split."""
    puzzles: dict[str, dict[tuple[int, ...], _Drawn]] = {"train": {}, "val": {}, "test": {}}
    wanted = sizes._asdict()

    def needed(part: str) -> bool:
        size: int = wanted[part]
        return len(puzzles[part]) < size

    for number in range(_PATIENCE * max(1, sum(sizes))):
        if not any(map(needed, wanted)):
            return Splits(*(_as_set(list(puzzles[name].values()), cells) for name in wanted))
        drawn = draw(number, needed)
        if drawn is not None and needed(drawn.split):
            puzzles[drawn.split].setdefault(drawn.question, drawn)
    have = {name: len(part) for name, part in puzzles.items()}
    raise DataError(
        f"there are too few different puzzles: found {have} of {wanted}; ask for fewer, or easier "
        "ones"
    )


def _as_set(drawn: list[_Drawn], cells: int) -> PuzzleSet:
    tokens, labels = (
        torch.tensor([each[k] for each in drawn], dtype=torch.uint8).view(-1, cells)
        for k in range(2)
    )
    return PuzzleSet.of(tokens, labels, torch.tensor([each.rating for each in drawn]))


def cache_folder() -> Path:
    """Return the folder of generated sets."""
    named = os.environ.get(CACHE)
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deq_zoo"


def _kept(name: str, make: Callable[[], Splits]) -> Splits:
    """Return a set from the cache, or make it; one that took long is kept."""
    path = cache_folder() / "reason" / f"{name}-v{VERSION}.safetensors"
    try:
        return _unpack(load(path.read_bytes()))
    except FileNotFoundError:
        pass
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        _log.warning("%s cannot be read (%s): the puzzles are drawn again", path, error)
    began = time.monotonic()
    splits = make()
    if time.monotonic() - began > _SLOW:
        try:
            write_atomically(path, save(_pack(splits)))
            _log.info("kept the puzzles as %s; the variable %s names another folder", path, CACHE)
        except OSError as error:
            _log.info("the puzzles are not kept: %s", error)
    return splits


_FIELDS = ("tokens", "labels", "ids", "rating", "groups")


def _pack(splits: Splits) -> dict[str, Tensor]:
    parts = splits._asdict().items()
    return {f"{name}.{key}": getattr(part, key) for name, part in parts for key in _FIELDS}


def _unpack(tensors: dict[str, Tensor]) -> Splits:
    return Splits(
        *(PuzzleSet(*(tensors[f"{name}.{key}"] for key in _FIELDS)) for name in Splits._fields)
    )
