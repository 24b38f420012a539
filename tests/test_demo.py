"""The pieces of `make demo`: a course to the equilibrium, its animation, and the page."""

from __future__ import annotations

import io
import re

import torch
from PIL import Image, ImageSequence

from deq_zoo.mdeq import MDEQClassifier
from deq_zoo.preset import find_preset
from deq_zoo.task import Picture
from examples.demo import converging, maze, page, solving
from examples.demo.animation import animated_images
from examples.demo.cost import measure


def make_course() -> converging.Course:
    torch.manual_seed(0)
    model = find_preset("mdeq-quick").task.build().eval()
    assert isinstance(model, MDEQClassifier)
    return converging.follow(model, torch.randn(3, model.config.in_channels, 28, 28))


def test_the_course_leads_to_the_equilibrium() -> None:
    course = make_course()
    assert len(course.features) == len(course.chance) == len(course.residuals)
    torch.testing.assert_close(course.chance.sum(2), torch.ones(course.chance.shape[:2]))
    assert (course.residuals[-1] < course.residuals[1] / 2).all()  # untrained, hence slow


def test_the_image_that_was_wrong_longest_is_found() -> None:
    said = torch.tensor([[1, 0, 2], [1, 1, 2], [1, 1, 0]])  # three evaluations of three images
    chance = torch.nn.functional.one_hot(said, 3).float()
    course = converging.Course(chance, chance, chance)
    assert converging.most_surprising(course, torch.tensor([1, 1, 2])) == 1


def test_an_animation_has_its_frames() -> None:
    frames = torch.arange(3, dtype=torch.uint8)[:, None, None, None].expand(3, 3, 4, 5)
    with Image.open(io.BytesIO(animated_images(frames, [0.1, 0.1, 0.1]))) as image:
        assert [frame.size for frame in ImageSequence.all_frames(image)] == [(5, 4)] * 3


def test_the_page_needs_nothing_else_and_hides_nothing() -> None:
    course = make_course()
    picture = converging.draw(course, torch.zeros(1, 28, 28, dtype=torch.uint8), 0)
    part = page.Section("A & B", "words", [picture], [["a", "b"], ["1", "<2>"]], "deq-zoo list")
    text = page.render("Title", "First words", [("9", "lives")], [part])
    assert not re.search(r"(src|href)=.?(?!data:)\w", text)
    for piece in ("A &amp; B", "<td>&lt;2&gt;</td>", "<th>a</th>", "deq-zoo list", "lives"):
        assert piece in text


def test_a_narrow_page_scrolls_strips_and_shrinks_other_pictures() -> None:
    def figure_of(width: int) -> str:
        file = io.BytesIO()
        Image.new("L", (width, 10)).save(file, "PNG")
        part = page.Section("A", "words", [Picture("a", "b", file.getvalue())])
        return page.render("Title", "First words", [], [part])

    scrolled = "<div class=scroll><img"
    assert scrolled in figure_of(60)
    assert scrolled not in figure_of(40)


def test_the_cost_of_both_ways_is_measured() -> None:
    settled, unrolled = (measure("mdeq-smoke", way) for way in ("equilibrium", "unrolled"))
    assert 0 < settled.graph < unrolled.graph
    assert settled.seconds > 0


def test_the_puzzle_is_solved() -> None:
    shown = solving.show()
    assert shown.solved.valid
    assert shown.solved.right
    assert shown.picture.png.startswith(b"\x89PNG")


def test_the_maze_is_solved() -> None:
    shown = maze.show()
    assert shown.solved
    assert shown.trained < maze.SIDE
    assert shown.picture.png.startswith(b"\x89PNG")
