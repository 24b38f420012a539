"""Where the puzzles of a task come from: the generators, or files."""

from __future__ import annotations

from math import isqrt
from typing import TYPE_CHECKING, Literal

import torch

from deq_zoo.data_dir import data_folder
from deq_zoo.errors import DataError
from deq_zoo.reason.files import read_csv, read_folder
from deq_zoo.reason.sets import PuzzleSet, Sizes, Splits, make_mazes, make_sudokus
from deq_zoo.task import generator

if TYPE_CHECKING:
    from deq_zoo.reason.task import SolvePuzzles

Source = Literal["sudoku4", "sudoku6", "sudoku9", "maze", "folder", "csv"]


def open_splits(task: SolvePuzzles, sizes: Sizes) -> Splits:
    """Return the puzzles of a task; raise `DataError` if they do not fit its network."""
    if task.data.startswith("sudoku"):
        side = int(task.data.removeprefix("sudoku"))
        return make_sudokus(side, sizes, task.data_seed, task.extra_givens, task.min_rating)
    if task.data == "maze":
        return make_mazes(isqrt(task.net.cells), task.paths, sizes, task.data_seed)
    splits = _open_files(task, sizes)
    for part in splits:
        _check_fits(part, task)
    return splits


def _open_files(task: SolvePuzzles, sizes: Sizes) -> Splits:
    """Read train and test, and hold validation puzzles out of the training groups."""
    if task.data == "csv":
        root = data_folder(task.data_dir, "csv", "train.csv and test.csv")
        train, test = (
            read_csv(root / f"{name}.csv", task.min_rating) for name in ("train", "test")
        )
    else:
        root = data_folder(task.data_dir, "folder", "train and test")
        train, test = read_folder(root, "train"), read_folder(root, "test")
    groups = len(train.groups) - 1
    order = torch.randperm(groups, generator=generator("choice", task.data_seed))
    if sizes.val >= groups:
        raise DataError(f"val_puzzles={sizes.val} leaves none of {groups} puzzles to train with")
    val, rest = order[: sizes.val], order[sizes.val :]
    rest = rest[: sizes.train] if sizes.train else rest
    first = train.take(train.groups[val])  # the originals: variants of a group come after it
    tested = torch.arange(min(len(test), sizes.test or len(test)))
    return Splits(_take_groups(train, rest), first, test.take(tested))


def _take_groups(data: PuzzleSet, chosen: torch.Tensor) -> PuzzleSet:
    """Return some groups of puzzles with all their variants."""
    first, after = data.groups[chosen], data.groups[chosen + 1]
    rows = torch.cat([torch.arange(int(a), int(b)) for a, b in zip(first, after, strict=True)])
    starts = torch.cat((torch.zeros(1, dtype=torch.long), (after - first).cumsum(0)))
    return PuzzleSet(
        data.tokens[rows], data.labels[rows], data.ids[rows], data.rating[rows], starts
    )


def _check_fits(data: PuzzleSet, task: SolvePuzzles) -> None:
    net = task.net
    if data.tokens.shape[1] != net.cells:
        raise DataError(
            f"the puzzles of {task.data_dir} have {data.tokens.shape[1]} cells: set "
            f"net.cells={data.tokens.shape[1]}, got {net.cells}"
        )
    for name, numbers in (("tokens", data.tokens), ("labels", data.labels)):
        if len(data) and int(numbers.max()) >= net.vocab:
            row = int((numbers >= net.vocab).any(1).nonzero()[0])
            raise DataError(
                f"the puzzles of {task.data_dir} have {name} up to {int(numbers.max())}, the first "
                f"in row {row} of those that were chosen: raise net.vocab, got {net.vocab}"
            )
    if len(data) and net.puzzle_width and int(data.ids.max()) >= net.puzzle_ids:
        raise DataError(
            f"the puzzles of {task.data_dir} have identifiers up to {int(data.ids.max())}: raise "
            f"net.puzzle_ids, got {net.puzzle_ids}"
        )
