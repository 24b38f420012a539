"""Puzzles: the task that reasoners are trained on."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isqrt
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from deq_zoo.checks import check_fields
from deq_zoo.exportable import Exportable, NoOptions
from deq_zoo.predictions import Failure, OutFolder, Prediction
from deq_zoo.reason.boards import BOARDS
from deq_zoo.reason.carry import (
    Carry,
    Exploration,
    Puzzles,
    advance,
    as_carry,
    refill,
    split_carries,
    value_of_going_on,
)
from deq_zoo.reason.config import EQR_SUDOKU, Gradient, ReasonConfig, SolveNoise
from deq_zoo.reason.convert import from_authors, pick_state, to_authors
from deq_zoo.reason.evaluation import evaluate_puzzles
from deq_zoo.reason.exporting import make_export
from deq_zoo.reason.loss import CellLoss, cell_accuracy, compute_losses
from deq_zoo.reason.model import Reasoner
from deq_zoo.reason.prediction import predict_files
from deq_zoo.reason.puzzles import puzzle_facts
from deq_zoo.reason.reasoned import Reasoned
from deq_zoo.reason.search import Search
from deq_zoo.reason.sets import VERSION, PuzzleSet, Sizes, Splits
from deq_zoo.reason.settings import check_settings
from deq_zoo.reason.sources import Source, open_splits
from deq_zoo.reason.symmetry import augment
from deq_zoo.task import (
    WHOLE,
    Converted,
    Evaluation,
    Loss,
    Picture,
    Score,
    Shard,
    Split,
    Task,
    Weights,
    generator,
)
from deq_zoo.uses import GRADIENT, SOLVE
from torchdeq import DEQConfig

_log = logging.getLogger("deq_zoo")


@dataclass(frozen=True)
class SolvePuzzles(Task):
    """Fill in the cells of puzzles; a puzzle stays in the batch until it halts.

    Args:
        net: the shape of the network.
        deq: options of the equilibrium; `f_max_iter` is the number of supervision steps of an
            update, `eval_f_max_iter` that of an attempt at a puzzle.
        search: how predictions spend evaluations.
        gradient: how training differentiates: as published for the kind of the network, through the
            last inner and the last answer step (one_step), through the last round (round), or as
            the options of the equilibrium say (deq).
        solve_noise: the noise of EqR inside a solve: off, or drawn once for each solve (frozen).
        decay: of the running average of the weights, with which evaluation computes; 0 keeps none.
        cell_loss: the cross-entropy of a cell, by stablemax or by softmax.
        data: Sudokus of 4, 6 or 9 digits and mazes, drawn by the generator; or from `data_dir`, a
            folder that the authors' programs wrote, or train.csv and test.csv.
        data_dir: folder with the data set's files.
        puzzles: training puzzles; 0 takes all of a file.
        val_puzzles: puzzles that choose the best checkpoint; of a file, training puzzles that are
            held out. 0 uses none, and the last checkpoint counts.
        test_puzzles: puzzles of the test; 0 takes all of a file.
        data_seed: of the generator, and of the choice from a file.
        min_rating: the least difficulty: guesses of a generated Sudoku, the rating in a CSV file.
        extra_givens: most givens beyond the necessary ones in a generated Sudoku.
        paths: moves of the shortest and of the longest path in a generated maze.
        augment: whether training Sudokus are changed by random symmetries of the board.
        batch: puzzles at work in each step.
        eval_batch: puzzles per step of evaluation.
        evaluation: how evaluation computes: by the published recursion, by the solver of the
            equilibrium, or by a stream with halting and restarts.
        depth: supervision steps of the recursion in evaluation; 0 takes those of training.
    """

    score: ClassVar[Score] = Score("exact", "%")
    shardwise: ClassVar[bool] = True  # the average is updated entry by entry

    net: ReasonConfig = EQR_SUDOKU
    deq: DEQConfig = field(default_factory=lambda: DEQConfig(f_max_iter=1))
    search: Search = field(default_factory=Search)
    gradient: Gradient = "published"
    solve_noise: SolveNoise = "off"
    decay: float = 0.999
    cell_loss: CellLoss = "stablemax"
    data: Source = "sudoku9"
    data_dir: str | None = None
    puzzles: int = 1000
    val_puzzles: int = 200
    test_puzzles: int = 1000
    data_seed: int = 0
    min_rating: int = 0
    extra_givens: int = 0
    paths: tuple[int, int] = (8, 40)
    augment: bool = True
    batch: int = 768
    eval_batch: int = 256
    evaluation: Literal["recursion", "solver", "stream"] = "recursion"
    depth: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, 1, "batch", "eval_batch")
        check_fields(self, 0, "puzzles", "val_puzzles", "test_puzzles", "min_rating", "depth")
        check_fields(self, 0, "extra_givens", "data_seed")
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay must lie in [0, 1), got {self.decay}")
        if len(self.paths) != 2 or not 0 < self.paths[0] <= self.paths[1]:
            raise ValueError(f"paths must be two numbers, the lower one first, got {self.paths}")
        if self.deq.f_max_iter < 1 and self.gradient != "deq":
            raise ValueError(f"f_max_iter must be at least 1 with gradient={self.gradient}, got 0")
        check_settings(self)

    @property
    def uses(self) -> frozenset[str]:
        return SOLVE | (GRADIENT if self.gradient == "deq" else frozenset())

    @property
    def reads_data_dir(self) -> bool:
        return self.data in ("folder", "csv")

    @property
    def validation_settings(self) -> frozenset[str]:
        if not self.reads_data_dir:  # the split of a generated puzzle follows from its orbit
            return frozenset()
        return frozenset({"val_puzzles", "data_seed", "min_rating"})

    @cached_property
    def _splits(self) -> Splits:
        sizes = Sizes(self.puzzles, self.val_puzzles, self.test_puzzles)
        return open_splits(self, sizes)

    @property
    def train_set(self) -> PuzzleSet:
        return self._splits.train

    @property
    def val_set(self) -> PuzzleSet | None:
        return self._splits.val if len(self._splits.val) else None

    @property
    def test_set(self) -> PuzzleSet:
        return self._splits.test

    def facts(self) -> dict[str, Any]:
        if self.reads_data_dir:
            named = self.data_dir is not None
            return puzzle_facts(self.net, self.train_set.labels if named else None)
        kind = "maze" if self.data == "maze" else "sudoku"
        return {"puzzle": kind, "side": isqrt(self.net.cells), "splits": VERSION}

    def build(self, facts: Mapping[str, Any] | None = None) -> Reasoner:
        model = Reasoner(self.net, self.deq, self.gradient, self.decay, self.solve_noise)
        model.search = self.search
        return model

    @property
    def steps_per_epoch(self) -> int:
        return max(1, (len(self.train_set.groups) - 1) // self.batch)

    def train_batch(self, step: int, seed: int, shard: Shard = WHOLE) -> Puzzles:
        rng = generator("puzzles", seed, step)
        rows = self._rows(step, seed, rng)
        data = self.train_set
        tokens, labels = data.tokens[rows], data.labels[rows]
        if self.augment and self.facts()["puzzle"] == "sudoku":
            tokens, labels = augment(BOARDS[isqrt(self.net.cells)], (tokens, labels), rng)
        mine = slice(shard.rank, None, shard.world)
        return Puzzles(tokens[mine].long(), labels[mine].long(), data.ids[rows][mine])

    def _rows(self, step: int, seed: int, rng: torch.Generator) -> Tensor:
        """Return the puzzles of batch `step`: all groups in a new order in every pass, none left.

        A batch takes the end of one pass and the beginning of the next. Of each group, which holds
        variants of one puzzle, it takes one.
        """
        groups = self.train_set.groups
        n = len(groups) - 1
        places = torch.arange(step * self.batch, (step + 1) * self.batch)
        passes = range(int(places[0]) // n, int(places[-1]) // n + 1)
        orders = [torch.randperm(n, generator=generator("pass", seed, k)) for k in passes]
        chosen = torch.cat(orders)[places - passes[0] * n]
        first, after = groups[chosen], groups[chosen + 1]
        share = torch.rand(len(chosen), generator=rng, dtype=torch.float64)
        return first + (share * (after - first)).long()

    def loss(self, model: Any, batch: Sequence[Tensor], carry: Any) -> Loss:
        filled = refill(None if carry is None else as_carry(carry), Puzzles(*batch))
        tokens, labels, ids = filled.puzzles
        out: Reasoned = model(tokens, filled.states, ids=ids, fresh=filled.halted)
        assert out.q is not None
        target = None
        if out.next_q is not None:
            target = value_of_going_on(out.next_q, filled.steps, self.net)
        losses = compute_losses(out.prediction, out.q, labels, target, self.cell_loss)
        drawn = Exploration.draw(filled.steps, max(2, self.net.max_steps))
        carried = advance(filled, out.state, out.q, self.net, drawn)
        metrics = self._metrics(out, labels, losses.right, carried)
        return Loss(losses.total / len(tokens), metrics, out.stats, carried)

    @staticmethod
    def _metrics(out: Reasoned, labels: Tensor, right: Tensor, carry: Carry) -> dict[str, Tensor]:
        assert out.moved is not None
        return {
            "train_exact": 100 * right.float().mean(),
            "train_cells": 100 * cell_accuracy(out.prediction, labels).float().mean(),
            "moved": out.moved.float().mean(),
            "halted": carry.halted.float().mean(),
        }

    def after_step(self, model: Any) -> None:
        model.update_average()

    def split_carry(self, carries: Sequence[Any], shard: Shard) -> Carry:
        return split_carries(carries, shard)

    def evaluate(self, model: Any, split: Split, thorough: bool = False) -> Evaluation:
        data = self.test_set if split == "test" else self.val_set
        assert data is not None, "the training loop asks for no score without validation data"
        if not self.reads_data_dir and model.facts and model.facts.get("splits") != VERSION:
            _log.warning(
                "this model was not trained on the splits that this version draws: unless it was "
                "trained on other data, it has seen puzzles that are scored now; train it again"
            )
        return evaluate_puzzles(self, model, data, thorough)

    def pictures(self, model: Any) -> list[Picture]:
        from deq_zoo.reason.pictures import draw_pictures

        return draw_pictures(model, self.test_set)

    def pick_state(self, content: Any) -> Weights | None:
        """Return the averaged weights of a checkpoint of EqR; see `convert.pick_state`."""
        return pick_state(content)

    def from_authors(self, state: Weights) -> Converted:
        return Converted(from_authors(self.build(), state), self.facts())

    def to_authors(self, state: Weights) -> dict[str, Tensor]:
        """Return the average of the weights, if there is one, in the authors' format."""
        return to_authors(state)

    def export(self, model: Any, options: NoOptions) -> Exportable:
        return make_export(model, model.facts)

    def predict(
        self, model: Any, paths: Sequence[Path], out: OutFolder
    ) -> Iterator[Prediction | Failure]:
        return predict_files(model, paths, out)
