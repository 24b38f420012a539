"""Pictures of a reasoner at work."""

from __future__ import annotations

from dataclasses import replace

import torch

from deq_zoo.preset import find_preset
from deq_zoo.reason.pictures import Course, draw_pictures, last_solved
from deq_zoo.reason.task import SolvePuzzles


def test_a_maze_is_drawn_step_by_step() -> None:
    task = find_preset("reason-maze13").task
    assert isinstance(task, SolvePuzzles)
    net = replace(task.net, cells=49, width=8, rounds=1, inner=1, max_steps=1)
    task = replace(task, net=net, puzzles=1, val_puzzles=1, test_puzzles=3, paths=(2, 6))
    model = task.build().eval()
    model.facts = task.facts()
    before = torch.random.get_rng_state()
    pictures = {picture.name: picture for picture in draw_pictures(model, task.test_set)}
    assert torch.equal(torch.random.get_rng_state(), before)
    assert set(pictures) == {"steps", "depth", "residuals"}
    assert "path" in pictures["steps"].caption
    model.facts = {"puzzle": "tokens"}
    assert [picture.name for picture in draw_pictures(model, task.test_set)] == [
        "depth",
        "residuals",
    ]


def test_the_puzzle_that_was_wrong_longest_is_shown() -> None:
    right = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 0, 1], [1, 1, 0, 1]]).bool()
    course = Course(torch.zeros(4, 4, 2), torch.zeros(4, 4), right)
    assert last_solved(course) == 1
    assert last_solved(course._replace(right=torch.zeros(4, 4).bool())) == 0
