"""A maze as it is solved: larger than any that the model has seen, by more iterations."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

import deq_zoo
from deq_zoo.reason import Reasoner, for_side
from deq_zoo.reason.mazes import draw_mazes
from deq_zoo.reason.pictures import follow, maze_pixels
from deq_zoo.reason.puzzles import Puzzle
from deq_zoo.reason.sets import PuzzleSet
from deq_zoo.reason.sides import side_of
from deq_zoo.task import Picture
from examples.demo.animation import animated

MODEL, SIDE = "reason-mazes", 31
MAZES = 8  # of which one is shown
_SEED, _MOVES = 7, 80  # of the mazes, and the length of their paths
STEPS = 64  # supervision steps that are followed, as many as `deq-zoo predict` makes
_EACH = 16  # of which so many are shown one by one, and of the others every third
_BLUE = "#3b6fb6"


class Shown(NamedTuple):
    """How a maze was answered.

    Args:
        text: the maze.
        solved: how many of the mazes have a right answer in the end.
        steps: supervision steps after which that of this one stays right; all if it does not.
        trained: the side of the mazes of training.
        picture: the way to the answer.
    """

    text: str
    solved: int
    steps: int
    trained: int
    picture: Picture


def show() -> Shown:
    """Follow the answers to some mazes, and show the one that is solved soonest.

    Answers after many steps depend on how a processor rounds, so the choice is made here.
    """
    model = deq_zoo.load(MODEL)
    assert isinstance(model, Reasoner)
    drawn = draw_mazes(SIDE, (_MOVES, _MOVES), np.random.default_rng(_SEED), set())
    pairs = zip(*islice(drawn, MAZES), strict=True)
    questions, labels = (torch.from_numpy(np.stack(each)).flatten(1) for each in pairs)
    large = for_side(model, SIDE)
    course = follow(large, PuzzleSet.of(questions, labels), STEPS)
    needed = [_steps_until_right(right) for right in course.right.unbind(1)]
    row = min(range(MAZES), key=lambda k: (not course.right[-1, k], needed[k]))
    question, label, steps, trained = questions[row], labels[row], needed[row], side_of(model)
    caption = (
        f"A maze of {SIDE}x{SIDE} cells, the path after some supervision steps (green; red where "
        "it is not yet right), and the cells that are not right. The network was trained on mazes "
        f"of {trained}x{trained}, with {model.trained_depth} steps at most."
    )
    shown = [k for k in range(steps) if k < _EACH or k == steps - 1 or not (k - _EACH) % 3]
    figures = _frames(question, label, course.answers[:, row], shown)
    picture = Picture("maze", caption, animated(figures, [0.25] * (len(shown) - 1) + [3.0]))
    text = Puzzle(large.facts).write(question.tolist())
    return Shown(text, int(course.right[-1].sum()), steps, trained, picture)


def _steps_until_right(right: Tensor) -> int:
    """Return the steps after which an answer (D,) stays right; all of them if it does not."""
    wrong = (~right).nonzero().flatten().tolist()
    return min(wrong[-1] + 2, len(right)) if wrong else 1


def _frames(question: Tensor, label: Tensor, answers: Tensor, steps: list[int]) -> Iterator[Figure]:
    """Yield one figure again and again, as it is after each step."""
    figure = Figure(figsize=(9.6, 3.4))
    places = ((0.01, 0.33), (0.35, 0.33), (0.75, 0.23))  # left edges and widths
    maze, path, curve = (figure.add_axes((x, 0.12, w, 0.76)) for x, w in places)
    maze.imshow(maze_pixels(question, question, SIDE), interpolation="nearest")
    maze.set_title(f"a maze of {SIDE}x{SIDE}", fontsize=10)
    image = path.imshow(maze_pixels(answers[0], label, SIDE), interpolation="nearest")
    for axes in (maze, path):
        axes.set_axis_off()
    wrong = (answers != label).sum(1)
    (line,) = curve.plot([], [], color=_BLUE)
    curve.set(
        xlim=(0, steps[-1] + 1), ylim=(0, 1.05 * int(wrong.max())), xlabel="supervision steps"
    )
    curve.set_title("cells that are not right", fontsize=10)
    curve.spines[["top", "right"]].set_visible(False)
    curve.tick_params(labelsize=8)
    for k in steps:
        image.set_data(maze_pixels(answers[k], label, SIDE))
        path.set_title(f"step {k + 1}", fontsize=10)
        line.set_data(range(1, k + 2), wrong[: k + 1].tolist())
        yield figure
