"""Reasoners for other programs: tokens and a start in, logits and the halting head out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from deq_zoo.errors import ZooError
from deq_zoo.exportable import Exportable
from deq_zoo.reason.core import States
from deq_zoo.reason.model import Reasoner
from deq_zoo.task import generator

_TOKENS = (
    "`tokens` are the cells of a puzzle, row by row: in a Sudoku 1 for a blank cell and d + 1 for "
    "the digit d; in a maze 1 for a wall, 2 for a free cell, 3 for the start and 4 for the goal."
)
_START = (
    " `y` and `z` are the states to start from: normal numbers with mean 0, drawn again while they "
    "are further than 2 from it, and scaled to a standard deviation of 1. Other numbers are "
    "another attempt, for puzzles that have not converged."
)
_AFTER = (
    "The largest of `logits` is the answer of a cell, in the tokens of the puzzle; 5 is a cell of "
    "a maze's path. `halting` are two logits: the head would stop if the first is larger."
)


class Answers(nn.Module):
    """A reasoner that solves for the fixed point from given states, or from those of the model."""

    def __init__(self, model: Reasoner) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, *start: Tensor) -> dict[str, Tensor]:
        out = self.model(tokens, States(*start) if start else None)
        return {"logits": out.prediction, "halting": out.q}


def make_export(model: Reasoner, facts: Mapping[str, Any]) -> Exportable:
    """Return a reasoner as other programs call it."""
    if model.freezes_noise:
        raise ZooError(
            "the noise of solve_noise=frozen depends on the puzzle, which no graph computes: "
            "--set solve_noise=off"
        )
    net, rng = model.net, generator("export")
    example = {"tokens": torch.randint(1, net.vocab, (2, net.cells), generator=rng)}
    meanings = {
        "tokens": "cells of the puzzle",
        "logits": "of the token of each cell",
        "halting": "logits of halting and of going on",
    }
    before = _TOKENS
    if net.kind == "eqr":
        example |= model.start(2, rng)._asdict()
        meanings |= {"y": "start of the answer", "z": "start of the scratch"}
        before += _START
    return Exportable(Answers(model), example, meanings, before, _AFTER, facts)
