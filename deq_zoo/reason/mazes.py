"""Mazes with one path between any two cells, as the published generator draws them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

WALL, FREE, START, GOAL, PATH = range(1, 6)
CHARACTERS = "# SGo"  # of the tokens above
_MAZES, _STARTS, _AGAIN = 200, 200, 50  # tries, as published

Tokens = NDArray[np.uint8]


class Maze(NamedTuple):
    """A maze (n, n) and the same with the cells between start and goal marked."""

    question: Tokens
    answer: Tokens


class NoMaze(ValueError):
    """The error of a generator that finds no maze with a path of the wanted length."""


def draw_mazes(
    side: int, lengths: tuple[int, int], rng: np.random.Generator, seen: set[bytes]
) -> Iterator[Maze]:
    """Yield mazes without end, none of them twice.

    Args:
        side: cells of a row, walls included; an even one leaves its last row and column a wall.
        lengths: the shortest and the longest path, in moves, both included.
        rng: the generator of the published programs, `numpy.random.default_rng`.
        seen: questions that were drawn before; new ones are added.
    """
    low, high = (min(max(length, 1), side**2 - 1) for length in lengths)
    while True:
        for _ in range(_AGAIN):
            maze = _draw(side, int(rng.integers(low, high + 1)), rng)
            if maze.question.tobytes() not in seen:
                break
        else:
            raise NoMaze(f"mazes of side {side} with paths of {low} to {high} moves are used up")
        seen.add(maze.question.tobytes())
        yield maze


def _draw(side: int, length: int, rng: np.random.Generator) -> Maze:
    """Draw a maze whose start and goal are `length` moves apart."""
    for _ in range(_MAZES):
        is_open = _carve(side, rng)
        cells = np.argwhere(is_open)
        if len(cells) < length + 1:
            continue
        for _ in range(_STARTS):
            start = tuple(cells[rng.integers(len(cells))])
            distance, previous = search_paths(is_open, start)
            goals = np.argwhere(distance == length)
            if len(goals):
                goal = tuple(goals[rng.integers(len(goals))])
                return _mark(is_open, start, goal, previous)
    raise NoMaze(f"no maze of side {side} has a path of {length} moves: choose shorter ones")


def _carve(side: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Draw a tree of corridors by a random walk that turns back at dead ends."""
    count = (side - 1) // 2 if side % 2 else (side - 2) // 2
    is_open = np.zeros((side, side), dtype=np.bool_)
    stack = [(int(rng.integers(count)), int(rng.integers(count)))]
    is_open[2 * stack[0][0] + 1, 2 * stack[0][1] + 1] = True
    while stack:
        r, q = stack[-1]
        around = [
            (r + dr, q + dq)
            for dr, dq in ((1, 0), (-1, 0), (0, 1), (0, -1))
            if 0 <= r + dr < count
            and 0 <= q + dq < count
            and not is_open[2 * (r + dr) + 1, 2 * (q + dq) + 1]
        ]
        if not around:
            stack.pop()
            continue
        a, b = around[int(rng.integers(len(around)))]
        is_open[2 * a + 1, 2 * b + 1] = is_open[r + a + 1, q + b + 1] = True
        stack.append((a, b))
    return is_open


def search_paths(
    is_open: NDArray[np.bool_], start: Sequence[int]
) -> tuple[NDArray[np.int64], dict[tuple[int, int], list[tuple[int, int]]]]:
    """Return moves from the start to each cell (-1: none), and the cells before it on the way.

    A cell with more than one cell before it has more than one shortest path.
    """
    distance = np.full(is_open.shape, -1, dtype=np.int64)
    first = (int(start[0]), int(start[1]))
    distance[first] = 0
    previous: dict[tuple[int, int], list[tuple[int, int]]] = {first: []}
    queue = deque([first])
    while queue:
        r, q = queue.popleft()
        for cell in ((r + 1, q), (r - 1, q), (r, q + 1), (r, q - 1)):
            inside = 0 <= cell[0] < is_open.shape[0] and 0 <= cell[1] < is_open.shape[1]
            if not inside or not is_open[cell]:
                continue
            if distance[cell] < 0:
                distance[cell] = distance[r, q] + 1
                previous[cell] = [(r, q)]
                queue.append(cell)
            elif distance[cell] == distance[r, q] + 1:
                previous[cell].append((r, q))
    return distance, previous


def _mark(
    is_open: NDArray[np.bool_],
    start: Sequence[int],
    goal: Sequence[int],
    previous: dict[tuple[int, int], list[tuple[int, int]]],
) -> Maze:
    """Return the tokens of a maze and of its path."""
    question = np.where(is_open, FREE, WALL).astype(np.uint8)
    a, b = (int(start[0]), int(start[1])), (int(goal[0]), int(goal[1]))
    question[a], question[b] = START, GOAL
    answer, cell = question.copy(), b
    while previous[cell]:
        cell = previous[cell][0]
        if cell != a:
            answer[cell] = PATH
    return Maze(question, answer)


class Solution(NamedTuple):
    """The solution of a maze.

    Args:
        answer: the maze with one shortest path.
        moves: its length.
        unique: whether there is no other shortest path.
    """

    answer: Tokens
    moves: int
    unique: bool


def solve_maze(question: Tokens) -> Solution | None:
    """Return a shortest path from start to goal; None if there is none."""
    is_open = question != WALL
    (start,), (goal,) = (np.argwhere(question == token).tolist() for token in (START, GOAL))
    distance, previous = search_paths(is_open, start)
    end = (int(goal[0]), int(goal[1]))
    if distance[end] < 0:
        return None
    unique, reached, level = True, {end}, int(distance[end])
    for _ in range(level):
        before = {cell for each in reached for cell in previous[each]}
        unique, reached = unique and len(before) == 1, before
    return Solution(_mark(is_open, start, goal, previous).answer, level, unique)
