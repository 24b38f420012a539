"""Published data on disk: folders of arrays, and the public CSV files.

A folder holds one folder for each split with `dataset.json` and five arrays, e.g.
`all__inputs.npy`. A CSV file has the columns `source,question,answer,rating`.
"""

from __future__ import annotations

import csv
import json
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deq_zoo.arrays import read_array
from deq_zoo.errors import DataError
from deq_zoo.reason.boards import BOARDS
from deq_zoo.reason.consistency import find_fault, puzzle_kind
from deq_zoo.reason.loss import IGNORED
from deq_zoo.reason.mazes import CHARACTERS
from deq_zoo.reason.sets import PuzzleSet

_FIELDS = ("inputs", "labels", "puzzle_identifiers", "puzzle_indices", "group_indices")
_SUDOKU = {".": 1, "0": 1, **{str(d): d + 1 for d in range(1, 10)}}
_MAZE = {character: token for token, character in enumerate(CHARACTERS, start=1)}


def read_folder(root: Path, split: str) -> PuzzleSet:
    """Read a split of a folder that the authors' programs wrote.

    Args:
        root: the folder with `train` and `test`.
        split: the name of one of them.
    """
    folder = root / split
    facts = _read_json(folder / "dataset.json")
    sets = facts.get("sets", ["all"])
    if sets != ["all"]:
        raise DataError(f"{folder / 'dataset.json'} lists the sets {sets}: expected ['all']")
    arrays = {field: read_array(folder / f"all__{field}.npy") for field in _FIELDS}
    tokens, labels = (_tokens(arrays[k], folder, facts) for k in ("inputs", "labels"))
    puzzles, groups = (_starts(arrays[k], folder, k) for k in ("puzzle_indices", "group_indices"))
    if len(labels) != len(tokens) or puzzles[-1] != len(tokens) or groups[-1] != len(puzzles) - 1:
        raise DataError(
            f"the arrays in {folder} do not belong together: {len(tokens)} inputs, {len(labels)} "
            f"labels, indices up to {int(puzzles[-1])}, groups up to {int(groups[-1])} of "
            f"{len(puzzles) - 1} puzzles"
        )
    ids = torch.from_numpy(arrays["puzzle_identifiers"].astype(np.int64))
    if len(ids) != len(puzzles) - 1:
        raise DataError(f"{folder} has {len(puzzles) - 1} puzzles and {len(ids)} identifiers")
    if bool((ids < 0).any()):
        row = int((ids < 0).nonzero()[0])
        raise DataError(f"{folder}: puzzle {row} has the identifier {int(ids[row])}: expected 0 on")
    by_example = ids.repeat_interleave(puzzles.diff())
    ignored = facts.get("ignore_label_id")
    if ignored is not None:
        labels = torch.where(labels == ignored, IGNORED, labels.long()).to(torch.int16)
    kind, side = puzzle_kind(tokens.shape[1], int(facts["vocab_size"]), labels)
    fault = find_fault(kind, side, tokens, labels)
    if fault is not None:
        raise DataError(f"{folder}: example {fault.row}: {fault.reason}")
    zeros = torch.zeros(len(tokens), dtype=torch.long)
    return PuzzleSet(tokens, labels, by_example, zeros, puzzles[groups])


def read_csv(path: Path, min_rating: int = 0) -> PuzzleSet:
    """Read Sudokus or mazes from a public CSV file.

    Args:
        path: the file.
        min_rating: leave out puzzles that are rated below.
    """
    questions, answers, ratings, lines, kinds = [], [], [], [], []
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            for number, row in enumerate(csv.DictReader(file), start=2):
                rating = _rating(row, path, number)
                if rating >= min_rating:
                    questions.append(_encode(row.get("question"), path, number))
                    answers.append(_encode(row.get("answer"), path, number))
                    ratings.append(rating)
                    lines.append(number)
                    kinds.append("sudoku" if _is_sudoku(row["question"]) else "maze")
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"cannot read {path}: {error}") from None
    if not questions:
        raise DataError(f"{path} has no puzzles rated {min_rating} or more")
    if {len(each) for each in (*questions, *answers)} != {len(questions[0])} or len({*kinds}) > 1:
        raise DataError(f"the puzzles of {path} differ in size or kind")
    tokens, labels = (torch.tensor(t, dtype=torch.uint8) for t in (questions, answers))
    side = isqrt(tokens.shape[1])
    fault = find_fault(kinds[0], side, tokens, labels)
    if fault is not None:
        raise DataError(f"{path}:{lines[fault.row]}: {fault.reason}")
    return PuzzleSet.of(tokens, labels, torch.tensor(ratings))


def _encode(text: str | None, path: Path, number: int) -> list[int]:
    """Return the tokens of a puzzle: a Sudoku of digits and dots, or a maze."""
    if not text:
        raise DataError(f"{path}:{number}: no question or answer; expected {_COLUMNS}")
    table = _SUDOKU if _is_sudoku(text) else _MAZE
    unknown = sorted(set(text) - table.keys())
    if unknown:
        raise DataError(
            f"{path}:{number}: a puzzle has the character {unknown[0]!r}; a Sudoku has digits and "
            f"dots, a maze {CHARACTERS!r}"
        )
    return [table[character] for character in text]


def _is_sudoku(text: str) -> bool:
    sizes = {board.cells for board in BOARDS.values()}
    return len(text) in sizes and set(text) <= _SUDOKU.keys()


_COLUMNS = "the columns source,question,answer,rating"


def _rating(row: dict[str, Any], path: Path, number: int) -> int:
    try:
        return int(row.get("rating") or 0)
    except ValueError:
        raise DataError(
            f"{path}:{number}: the rating {row['rating']!r} is no whole number"
        ) from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        facts = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"cannot read {path}: {error}; --data-dir names a folder with train and test, as the "
            "authors' programs write it"
        ) from None
    if not isinstance(facts, dict):
        raise DataError(f"{path} should hold a JSON object")
    return facts


def _tokens(array: np.ndarray[Any, Any], folder: Path, facts: dict[str, Any]) -> Tensor:
    """Return an array of tokens as bytes; whole numbers of any kind are read."""
    cells, vocab = int(facts.get("seq_len", 0)), int(facts.get("vocab_size", 0))
    if array.ndim != 2 or array.dtype.kind not in "iu" or array.shape[1] != cells:
        raise DataError(
            f"{folder} should hold whole numbers (examples, {cells}), got {array.dtype} "
            f"{array.shape}"
        )
    if array.size and not 0 <= int(array.min()) <= int(array.max()) < min(vocab, 256):
        raise DataError(f"{folder} has tokens outside of 0 to {vocab - 1}")
    return torch.from_numpy(array.astype(np.uint8))


def _starts(array: np.ndarray[Any, Any], folder: Path, name: str) -> Tensor:
    """Return the places where puzzles or groups begin, checked."""
    starts = torch.from_numpy(array.astype(np.int64))
    if starts.dim() != 1 or len(starts) < 2 or starts[0] != 0 or bool((starts.diff() < 1).any()):
        raise DataError(f"{folder / f'all__{name}.npy'} should rise from 0, step by step")
    return starts
