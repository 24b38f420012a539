"""A puzzle as it is solved by a model that comes with the package."""

from __future__ import annotations

from typing import NamedTuple

import torch

import deq_zoo
from deq_zoo.reason import Reasoner
from deq_zoo.reason.pictures import draw_course, follow
from deq_zoo.reason.prediction import SolvedPuzzle
from deq_zoo.reason.puzzles import Puzzle
from deq_zoo.reason.sets import PuzzleSet
from deq_zoo.task import Picture

MODEL = "reason-6x6"
PUZZLE = ".3......1...3.4..2...4...1.2..2...63"  # a test puzzle that takes a solver four guesses


class Shown(NamedTuple):
    """The answer to the puzzle, and a picture of the way there."""

    solved: SolvedPuzzle
    picture: Picture


def show() -> Shown:
    """Solve the puzzle, once as users do, and once step by step."""
    model = deq_zoo.load(MODEL)
    assert isinstance(model, Reasoner)
    solved = model.predict(PUZZLE).prediction
    puzzle = Puzzle(model.facts)
    question, answer = (torch.tensor(puzzle.read(t)) for t in (solved.question, solved.answer))
    data = PuzzleSet.of(question, answer)
    picture = draw_course(puzzle, data, follow(model, data))
    caption = "Black: givens. Green: as in the final answer. Red: not yet."
    return Shown(solved, picture._replace(caption=caption))
