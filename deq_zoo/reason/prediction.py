"""From puzzles as users have them to answers: texts, files, and how sure an answer is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby
from math import isfinite, isqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from deq_zoo.errors import ZooError
from deq_zoo.output import Output
from deq_zoo.predictions import Failure, OutFolder, Prediction
from deq_zoo.reason.core import States
from deq_zoo.reason.inference import Answer, find_answer, find_answers
from deq_zoo.reason.puzzles import Checked, Puzzle, Question, read_questions
from deq_zoo.reason.sides import fits_any_side, for_side

if TYPE_CHECKING:
    from deq_zoo.reason.model import Reasoner

_LONGEST = 1 << 20  # bytes of a file of puzzles


@dataclass(frozen=True)
class SolvedPuzzle:
    """A puzzle with the answer of a model.

    Args:
        question: lines of text.
        answer: lines of text.
        valid: whether the answer keeps the givens and obeys all rules.
        right: whether it is the solution that the zoo's own solver has found; None if that solver
            gave up, or found several.
        head: the probability, by the halting head, that the answer is right.
        residual: of the answer's state, relative; low for an answer that is settled.
        evaluations: supervision steps of all attempts.
        attempts: starts that were tried.
        head_side: the side of the boards that the head was trained on, if it is another one; else
            0. On larger boards the head is too sure.
    """

    question: str
    answer: str
    valid: bool
    right: bool | None
    head: float
    residual: float
    evaluations: int
    attempts: int = 1
    head_side: int = 0


def describe(puzzle: Puzzle, checked: Checked, answer: Answer, model: Reasoner) -> SolvedPuzzle:
    """Return an answer as users read it."""
    tokens, trained = tuple(answer.tokens.tolist()), model.facts.get("trained_side", 0)
    right = tokens == checked.solutions[0] if len(checked.solutions) == 1 else None
    return SolvedPuzzle(
        puzzle.write(checked.tokens),
        puzzle.write(tokens),
        puzzle.obeys(checked.tokens, tokens),
        right,
        answer.head,
        answer.residual,
        answer.evaluations,
        answer.attempts,
        trained if trained != puzzle.side else 0,
    )


def as_question(x: Any, model: Reasoner) -> Question:
    """Return one puzzle: a text, digits or tokens; raise `ZooError` for anything else."""
    own, any_side = Puzzle(model.facts), fits_any_side(model)
    if isinstance(x, str):
        questions = read_questions(x, own, any_side)
        if len(questions) != 1:
            raise ZooError(f"expected one puzzle, got {len(questions)}")
        return questions[0]
    count = _count_cells(x)
    if any_side and count and isqrt(count) ** 2 == count:
        own = Puzzle({"puzzle": own.kind, "side": isqrt(count)})
    tokens = whole_numbers(x, own.side)
    if not isinstance(x, Tensor) and own.kind == "sudoku":
        tokens = [digit + 1 for digit in tokens]
    allowed = range(1, own.side + 2 if own.kind == "sudoku" else 5)
    for token in tokens:
        if token not in allowed:
            raise ZooError(
                f"a puzzle has tokens from {allowed[0]} to {allowed[-1]}, got {token}; a list "
                "holds the digits of a Sudoku, 0 for a blank cell, a tensor holds tokens"
            )
    return Question(own, tuple(tokens))


def _count_cells(x: Any) -> int:
    """Return the number of cells in anything that may be a board; 0 if it is none."""
    if isinstance(x, Tensor):
        return x.numel()
    if isinstance(x, np.ndarray):
        return x.size
    if not isinstance(x, Sequence) or isinstance(x, (str, bytes)):
        return 0
    return sum(len(row) if isinstance(row, Sequence) else 1 for row in x)


def whole_numbers(x: Any, side: int) -> list[int]:
    """Return the cells of one board, row by row or as a list of rows; raise `ZooError` for others.

    Args:
        x: a tensor, an array or a list of whole numbers.
        side: cells of a row.
    """
    if isinstance(x, (Tensor, np.ndarray)):
        x = (x[0] if x.ndim > 1 and len(x) == 1 else x).tolist()  # a batch of one, too
    if not isinstance(x, Sequence) or isinstance(x, (str, bytes)):
        raise ZooError(f"a puzzle is a text, a path, a list or a tensor, got {type(x).__name__}")
    if x and all(isinstance(row, Sequence) and len(row) == side for row in x) and len(x) == side:
        x = [cell for row in x for cell in row]
    for cell in x:
        if isinstance(cell, (bool, np.bool_)) or not isinstance(cell, (int, np.integer)):
            raise ZooError(
                f"the cells of a puzzle are whole numbers, {side**2} of them or {side} rows of "
                f"{side}, got {cell!r}"
            )
    if len(x) != side**2:
        raise ZooError(f"a puzzle has {side**2} cells, got {len(x)}")
    return [int(cell) for cell in x]


def read_text(path: Path) -> str:
    """Return the text of a file of puzzles; raise `ZooError` if it is none."""
    try:
        if path.stat().st_size > _LONGEST:
            raise ZooError(f"{path} is no file of puzzles: it is larger than {_LONGEST} bytes")
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ZooError(f"{path} is no text file") from None
    except OSError as error:
        raise ZooError(f"cannot read {path}: {error}") from None


def predict_files(
    model: Reasoner, paths: Sequence[Path], out: OutFolder
) -> Iterator[Prediction | Failure]:
    """Yield the answers to all puzzles in text files; an impossible puzzle yields a `Failure`."""
    own, any_side = Puzzle(model.facts), fits_any_side(model)
    for path in paths:
        try:
            questions = read_questions(read_text(path), own, any_side)
        except ZooError as error:
            yield Failure(str(path), f"{path}: {error}")
            continue
        yield from _solve_all(model, path, questions)


class _Good(NamedTuple):
    """A puzzle that can be solved, where it comes from, and the model for its side."""

    source: str
    puzzle: Puzzle
    checked: Checked
    model: Reasoner


def _solve_all(
    model: Reasoner, path: Path, questions: Sequence[Question]
) -> Iterator[Prediction | Failure]:
    good: list[_Good] = []
    fit = cache(partial(for_side, model.eval()))  # one copy for each side
    for number, (puzzle, tokens) in enumerate(questions, start=1):
        source = f"{path}:{number}" if len(questions) > 1 else str(path)
        try:
            fitting = fit(puzzle.side)
            good.append(_Good(source, puzzle, puzzle.check(tokens), fitting))
        except ZooError as error:
            yield Failure(source, f"{source}: {error}")
    for _, group in groupby(good, lambda each: each.puzzle.side):
        yield from _solve_batch(list(group))


def _solve_batch(good: Sequence[_Good]) -> Iterator[Prediction]:
    """Yield the answers to puzzles of one side."""
    model = good[0].model
    batch = torch.tensor([each.checked.tokens for each in good])
    with torch.no_grad():
        answers = list(find_answers(model, batch, model.search))
    for (source, puzzle, checked, _), answer in zip(good, answers, strict=True):
        solved = describe(puzzle, checked, answer, model)
        text = f"{source}: {sentence(solved, checked)}\n{solved.answer}"
        data = {
            "question": solved.question,
            "answer": solved.answer,
            "valid": solved.valid,
            "right": solved.right,
            "head": solved.head,
            "residual": solved.residual if isfinite(solved.residual) else None,
            "evaluations": solved.evaluations,
            "attempts": solved.attempts,
            "settled": answer.settled,
        }
        yield Prediction(source, text, data)


def sentence(solved: SolvedPuzzle, checked: Checked) -> str:
    """Return an answer and how sure it is as a sentence, for people."""
    verdict = "solved" if solved.valid else "not solved: the answer breaks the rules"
    other = f", trained on {solved.head_side}x{solved.head_side}" if solved.head_side else ""
    notes = [
        f"{100 * solved.head:.1f} % sure by its halting head{other}",
        f"residual {solved.residual:.1e}",
        f"{solved.evaluations} evaluations",
    ]
    if solved.attempts > 1:
        notes.append(f"{solved.attempts} attempts")
    if checked.ambiguous:
        notes.append("the puzzle has more than one solution")
    if not checked.solutions:
        notes.append("too hard for the zoo's own solver, so that nothing else has checked it")
    return f"{verdict} ({', '.join(notes)})"


def solve_one(
    model: Reasoner, x: Any, z0: States | None, call: dict[str, Any]
) -> Output[SolvedPuzzle, States]:
    """Return the answer to one puzzle, as `find_answers` finds it, with its states."""
    other = sorted(call.keys() - {"f_max_iter"})
    if other:
        raise TypeError(f"a prediction takes the option f_max_iter alone, got {', '.join(other)}")
    puzzle, cells = as_question(read_text(x) if isinstance(x, Path) else x, model)
    model = for_side(model, puzzle.side)  # refuses boards that are too large to check soon
    checked = puzzle.check(cells)
    tokens = torch.tensor([checked.tokens], device=model.device)
    answer, states, stats = find_answer(model, tokens, model.search, z0, call.get("f_max_iter"))
    return Output([describe(puzzle, checked, answer, model)], states, stats)
