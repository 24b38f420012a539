"""Pictures of a reasoner at work: a puzzle step by step, accuracy by evaluations, residuals."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from deq_zoo.drawing import Line, line_plot, new_axes, to_png
from deq_zoo.errors import ZooError
from deq_zoo.reason.keyed import draw_starts, recursion_noise
from deq_zoo.reason.loss import IGNORED
from deq_zoo.reason.mazes import GOAL, PATH, START, WALL
from deq_zoo.reason.model import Reasoner
from deq_zoo.reason.puzzles import Puzzle
from deq_zoo.reason.sets import PuzzleSet
from deq_zoo.task import Picture

_PUZZLES = 48  # test puzzles behind the curves, the first ones
_BEYOND = 4  # depth of the curves relative to that of training
_SHOWN = 6  # steps of one puzzle
_COLOURS = {WALL: (40, 40, 40), START: (40, 120, 220), GOAL: (220, 120, 30), PATH: (90, 180, 90)}


class Course(NamedTuple):
    """The answers after each supervision step.

    Args:
        answers: (D, B, L).
        residuals: (D, B), relative.
        right: (D, B).
    """

    answers: Tensor
    residuals: Tensor
    right: Tensor


def draw_pictures(model: Reasoner, data: PuzzleSet) -> list[Picture]:
    """Draw what a model does with the first puzzles of a test set."""
    course = follow(model, data.take(torch.arange(min(_PUZZLES, len(data)))))
    pictures = [*draw_accuracy(course, model), *draw_residuals(course)]
    try:
        puzzle = Puzzle(model.facts)
    except ZooError:  # tokens of another kind have no picture
        return pictures
    return [draw_course(puzzle, data, course), *pictures]


@torch.no_grad()
def follow(model: Reasoner, data: PuzzleSet, steps: int | None = None) -> Course:
    """Return the answers to puzzles after each step of the published recursion.

    Args:
        model: in evaluation mode.
        data: the puzzles.
        steps: supervision steps; by default four times those of training.
    """
    tokens, ids = data.tokens.long().to(model.device), data.ids.to(model.device)
    states = draw_starts(model, tokens, model.search.seed)
    labels = data.labels.long()
    answers, residuals, right = [], [], []
    noise = recursion_noise(tokens, model.search.seed)
    for _ in range(_BEYOND * model.trained_depth if steps is None else steps):
        out = model.recurse(tokens, 1, states, ids=ids, noise=noise)
        assert out.stats is not None
        states = out.state
        answer = out.prediction.argmax(-1).cpu()
        answers.append(answer)
        residuals.append(out.stats["rel_trace"][:, -1].float().cpu())
        right.append(((answer == labels) | (labels == IGNORED)).all(1))
    return Course(torch.stack(answers), torch.stack(residuals), torch.stack(right))


def draw_course(puzzle: Puzzle, data: PuzzleSet, course: Course) -> Picture:
    """Draw the answer to one puzzle after some steps: that which was solved last, if any was."""
    depth, row = len(course.answers), last_solved(course)
    solved = bool(course.right[-1, row])
    steps = sorted({min(depth, round(depth ** (k / (_SHOWN - 1)))) for k in range(_SHOWN)})
    question, label = data.tokens[row].long(), data.labels[row].long()
    figure = Figure(figsize=(2.1 * (len(steps) + 1), 2.5), layout="constrained")
    panels = [("the puzzle", question)]
    panels += [(f"step {step}", course.answers[step - 1, row]) for step in steps]
    for k, (title, answer) in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), k + 1)
        draw = _draw_sudoku if puzzle.kind == "sudoku" else _draw_maze
        draw(axes, puzzle, question, answer, label if k else question)
        axes.set_title(title, fontsize=9)
    which = "the first test puzzle, which is not solved"
    if solved:
        which = f"that of the first {course.right.shape[1]} test puzzles that was solved last"
    caption = (
        f"The answer to {which}, after some supervision steps of the published recursion: givens "
        "are black, right cells green, wrong ones red."
    )
    if puzzle.kind == "maze":
        caption = (
            f"The path through {which}, as it grows with the supervision steps of the published "
            "recursion: start blue, goal orange, path green, wrong cells red."
        )
    return Picture("steps", caption, to_png(figure))


def last_solved(course: Course) -> int:
    """Return the puzzle that is solved at the end and was wrong longest; 0 if none is solved."""
    late = torch.arange(1, len(course.right) + 1)[:, None] * ~course.right
    wrong_until = torch.where(course.right[-1], late.amax(0), -1)
    return int(wrong_until.argmax())


def _draw_sudoku(
    axes: Any, puzzle: Puzzle, question: Tensor, answer: Tensor, label: Tensor
) -> None:
    n, board = puzzle.side, puzzle.board
    axes.set(xlim=(0, n), ylim=(n, 0), aspect="equal", xticks=[], yticks=[])
    for k in range(n + 1):
        axes.axhline(k, color="black", linewidth=1.4 if k % board.box_rows == 0 else 0.3)
        axes.axvline(k, color="black", linewidth=1.4 if k % board.box_columns == 0 else 0.3)
    for cell in range(n * n):
        token = int(answer[cell])
        if token == 1:
            continue
        given, right = int(question[cell]) > 1, token == int(label[cell])
        colour = "crimson" if not right else "black" if given else "seagreen"
        axes.text(
            cell % n + 0.5,
            cell // n + 0.55,
            puzzle.character(token),
            ha="center",
            va="center",
            color=colour,
            fontsize=60 / n,
        )


def _draw_maze(axes: Any, puzzle: Puzzle, question: Tensor, answer: Tensor, label: Tensor) -> None:
    axes.imshow(maze_pixels(answer, label, puzzle.side), interpolation="nearest")
    axes.set_axis_off()


def maze_pixels(answer: Tensor, label: Tensor, side: int) -> NDArray[np.uint8]:
    """Return (side, side, 3): start blue, goal orange, path green, cells unlike the label red."""
    pixels = np.full((side * side, 3), 255, dtype=np.uint8)
    for cell, token in enumerate(answer.tolist()):
        pixels[cell] = _COLOURS.get(token, (255, 255, 255))
        if int(label[cell]) not in (token, IGNORED):
            pixels[cell] = (220, 60, 60)
    return pixels.reshape(side, side, 3)


def draw_accuracy(course: Course, model: Reasoner) -> list[Picture]:
    """Draw the share of solved puzzles by the number of evaluations."""
    depth, count = course.right.shape
    exact = (100 * course.right.double().mean(1)).tolist()
    caption = (
        f"Exact answers among the first {count} test puzzles, by the supervision steps of each; "
        f"training uses {model.trained_depth} at most."
    )
    line = Line("exact", list(range(1, depth + 1)), exact)
    return line_plot("depth", caption, [line], "supervision steps", "exact answers [%]")


def draw_residuals(course: Course) -> list[Picture]:
    """Draw how residuals of solved and unsolved puzzles are distributed after the last step."""
    last = course.residuals[-1].double().clamp_min(1e-12).log10()
    right = course.right[-1]
    finite = last.isfinite()
    if int(finite.sum()) < 2:
        return []
    figure, axes = new_axes()
    low, high = float(last[finite].min()), float(last[finite].max())
    bins = np.linspace(low - 0.1, high + 0.1, 25).tolist()
    for label, rows in (("solved", right & finite), ("not solved", ~right & finite)):
        if bool(rows.any()):
            axes.hist(last[rows].numpy(), bins=bins, alpha=0.6, label=f"{label}: {int(rows.sum())}")
    axes.set(xlabel="log10 of the relative residual", ylabel="puzzles")
    axes.legend(frameon=False, fontsize=8)
    caption = (
        f"Residuals after the last of {len(course.right)} supervision steps, of the first "
        f"{len(right)} test puzzles: a confidence that needs no labels."
    )
    return [Picture("residuals", caption, to_png(figure))]
