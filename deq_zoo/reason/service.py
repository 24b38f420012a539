"""Answers to puzzles for a server: every puzzle is a search of its own."""

from __future__ import annotations

from typing import Any

from deq_zoo.errors import ZooError
from deq_zoo.model import Model
from deq_zoo.reason.model import Reasoner
from deq_zoo.reason.puzzles import Puzzle
from deq_zoo.serving.service import Field, Service, Values, describe_stats


class PuzzleAnswers(Service[Reasoner]):
    """The answer to one puzzle."""

    fields = (Field("puzzle", "text", "a Sudoku with dots for blank cells, or a maze"),)

    def __init__(self, model: Reasoner) -> None:
        super().__init__(model)
        Puzzle(model.facts)  # raises for a model of other puzzles

    def answer(self, values: Values) -> dict[str, Any]:
        out = self.model.predict(values["puzzle"])
        solved = out.prediction
        return {
            "prediction": solved.answer,
            "valid": solved.valid,
            "right": solved.right,
            "head": solved.head,
            "attempts": solved.attempts,
            **describe_stats(out.stats),
        }


def make_service(model: Model) -> PuzzleAnswers:
    """Return the service of a reasoner."""
    if not isinstance(model, Reasoner):
        raise ZooError(f"{type(model).__name__} cannot be served")
    return PuzzleAnswers(model)
