"""Checks of settings that contradict each other, cannot work, or would have no effect."""

from __future__ import annotations

from math import isqrt
from typing import TYPE_CHECKING

from deq_zoo.reason.search import relative_tolerance
from torchdeq import get_deq

if TYPE_CHECKING:
    from deq_zoo.reason.task import SolvePuzzles


def check_settings(task: SolvePuzzles) -> None:
    """Raise `ValueError` for settings of a task that cannot be meant."""
    _check_board(task)
    _check_data(task)
    _check_search(task)
    _check_effects(task)


def _check_board(task: SolvePuzzles) -> None:
    """Refuse a network of another board than the generated puzzles."""
    kind, net = task.data, task.net
    if kind.startswith("sudoku"):
        side = int(kind.removeprefix("sudoku"))
        if (net.cells, net.vocab) != (side**2, side + 2):
            raise ValueError(
                f"data={kind} needs net.cells={side**2} and net.vocab={side + 2}, got "
                f"{net.cells} and {net.vocab}"
            )
    side = isqrt(net.cells)
    if kind == "maze" and (side**2 != net.cells or side < 3 or net.vocab != 6):
        raise ValueError(
            "data=maze needs net.cells to be the square of a side of at least 3 and net.vocab=6, "
            f"got {net.cells} and {net.vocab}"
        )
    if net.mixer == "attention" and net.position == "none":
        raise ValueError(
            "attention without positions cannot tell cells apart: set net.position to rope, rope2d "
            "or learned"
        )


def _check_data(task: SolvePuzzles) -> None:
    """Refuse sets that a generator cannot draw."""
    if task.reads_data_dir:
        return
    for name in ("puzzles", "test_puzzles"):
        if not getattr(task, name):
            raise ValueError(
                f"{name}=0 takes all puzzles of a file, and data={task.data} has no end: set "
                f"{name} to at least 1"
            )
    if task.data == "sudoku4" and task.min_rating:
        raise ValueError(
            f"min_rating={task.min_rating} asks for puzzles that need a guess, and no Sudoku of "
            "four digits does: set min_rating=0"
        )


def _check_search(task: SolvePuzzles) -> None:
    """Refuse searches that would raise at the first puzzle."""
    search, kind = task.search, task.net.kind
    if search.restarts and kind != "eqr":
        raise ValueError(
            f"search.restarts={search.restarts} needs random starts, which EqR has, and "
            f"net.kind={kind} always starts from the same states: set search.restarts=0 too"
        )
    if search.halt == "both" and not relative_tolerance(task.deq.f_stop):
        raise ValueError(
            "search.halt=both needs a relative tolerance: set f_stop_mode=rel and f_tol, too"
        )
    if task.evaluation == "stream":
        deq = get_deq(task.deq)
        if not deq.make_solver({}).streams or not deq.eval_f_max_iter:
            raise ValueError(
                f"evaluation=stream cannot work with f_solver={task.deq.f_solver} and "
                f"{deq.eval_f_max_iter} evaluations: set f_solver to fixed_point_iter, anderson or "
                "broyden without a line search, and eval_f_max_iter above 0"
            )


def _check_effects(task: SolvePuzzles) -> None:
    """Refuse settings that would have no effect."""
    generated = task.data.startswith("sudoku")
    if task.extra_givens and not generated:
        raise ValueError(f"extra_givens would have no effect with data={task.data}: set it to 0")
    if task.min_rating and not (generated or task.data == "csv"):
        raise ValueError(f"min_rating would have no effect with data={task.data}: set 0")
    if task.paths != type(task).paths and task.data != "maze":
        raise ValueError(f"paths would have no effect with data={task.data}: drop it")
    if task.data == "maze" and not task.augment:
        raise ValueError("augment=false would have no effect with data=maze: drop it")
    if task.depth and task.evaluation != "recursion":
        raise ValueError(
            f"depth would have no effect with evaluation={task.evaluation}: set "
            "eval_f_max_iter instead, and depth to 0"
        )
    if task.solve_noise == "frozen" and (task.net.kind != "eqr" or not task.net.noise):
        raise ValueError(
            "solve_noise=frozen would have no effect: only EqR with net.noise above 0 has noise"
        )
