"""Networks whose cells see only the cells around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import deq_zoo
from deq_zoo.errors import CheckpointError, ZooError
from deq_zoo.predictions import Failure, OutFolder, Prediction
from deq_zoo.preset import find_preset
from deq_zoo.reason.convert import from_authors, to_authors
from deq_zoo.reason.core import States
from deq_zoo.reason.exporting import make_export
from deq_zoo.reason.layers import Convolution, inner_width
from deq_zoo.reason.mazes import Maze, draw_mazes
from deq_zoo.reason.model import Reasoner
from deq_zoo.reason.prediction import predict_files
from deq_zoo.reason.puzzles import Puzzle
from deq_zoo.reason.sides import for_side
from tests.zoo.reason.nets import SETTLING, make_model, make_tokens
from torchdeq import FixedPointIter, export

NET = replace(SETTLING, mixer="conv", multiple=4)


def test_a_cell_sees_the_cells_around_it_and_nothing_beyond_the_edge() -> None:
    conv, h = Convolution(2).double(), torch.randn(3, 16, 2, dtype=torch.float64)
    board, image = h.view(3, 4, 4, 2), torch.zeros(3, 4, 4, 2, dtype=torch.float64)
    for row in range(4):
        for column in range(4):
            for down in (-1, 0, 1):
                for right in (-1, 0, 1):
                    r, q = row + down, column + right
                    if 0 <= r < 4 and 0 <= q < 4:
                        w = conv.weight[:, :, down + 1, right + 1]
                        image[:, row, column] += board[:, r, q] @ w.T
    torch.testing.assert_close(conv(h), image.flatten(1, 2))


def test_information_travels_one_cell_in_a_call() -> None:
    model, tokens = make_model(NET).eval(), make_tokens(1, NET)
    other = tokens.clone()
    other[0, 0] = tokens[0, 0] % 4 + 1
    states, moved = model.start(1), list[int]()
    with torch.no_grad():
        x, y = (model.body.embed(t, None) for t in (tokens, other))
        for _ in range(2):
            network = model.body.L_level
            x, y = network(x, states.z, None), network(y, states.z, None)
            moved.append(int((x != y).any(-1).sum()))
    assert moved == [4, 9]


def test_halting_reads_all_cells() -> None:
    model = make_model(NET)
    y = torch.randn(1, 16, 8, dtype=torch.float64, requires_grad=True)
    model.core.halting(y)[0, 0].backward()
    assert y.grad is not None
    assert bool((y.grad.abs().sum(-1) > 0).all())


def test_solve_and_recursion_agree() -> None:
    model, tokens = make_model(NET).eval(), make_tokens(3, NET)
    start = model.start(3)
    with torch.no_grad():
        out, limit = model(tokens, start), model.recurse(tokens, 120, start)
    assert out.stats is not None
    assert bool(out.stats.converged.all())
    torch.testing.assert_close(out.prediction, limit.prediction, rtol=1e-6, atol=1e-6)


def test_the_implicit_gradient_is_that_of_an_unrolled_recursion() -> None:
    tokens, tight = make_tokens(2, NET), {"f_tol": 1e-12, "f_stop_mode": "rel"}
    exact = {"ift": True, "b_solver": "gmres", "b_max_iter": 100, "b_tol": 1e-12, **tight}
    grads = []
    for deq in ({**exact, "f_max_iter": 100}, {"grad": [60], "f_max_iter": 40, **tight}):
        model = make_model(NET, gradient="deq", deq=deq).train()
        out = model(tokens, make_model(NET).start(2, torch.Generator().manual_seed(0)))
        out.prediction.square().sum().backward()
        grads.append({name: p.grad for name, p in model.core.L_level.named_parameters()})
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-6, atol=1e-9)


def test_inner_widths_follow_the_multiple() -> None:
    assert [inner_width(32, 4.0, m) for m in (1, 32, 256)] == [85, 96, 256]
    weights = dict(make_model(NET).core.named_parameters())
    assert weights["L_level.layers.0.mlp.down_proj.weight"].shape == (8, 24)


def test_convolutions_have_no_weights_of_the_authors() -> None:
    model = make_model(NET)
    with pytest.raises(CheckpointError, match="mixer=conv"):
        to_authors(model.state_dict())
    with pytest.raises(CheckpointError, match="mixer=conv"):
        from_authors(model, {})
    assert model.weight_kind("core.L_level.layers.0.conv.weight") == "core_matrix"


@pytest.mark.slow
def test_a_convolution_is_exported() -> None:
    model = make_model(NET).float().eval()
    exportable = make_export(model, {})
    example = tuple(exportable.example.values())
    program = export.export(exportable.module, example, solver=FixedPointIter()).module()
    with torch.no_grad():
        own, answer = exportable.module(*example), program(*example)
    torch.testing.assert_close(answer["logits"], own["logits"], atol=1e-4, rtol=1e-4)


@pytest.fixture
def of_mazes() -> Reasoner:
    """Return a model of mazes of 5x5."""
    model = make_model(replace(NET, cells=25), deq={"eval_f_max_iter": 4})
    model.facts = {"puzzle": "maze", "side": 5}
    return model.eval()


def drawn(side: int, moves: int) -> Maze:
    return next(draw_mazes(side, (moves, moves), np.random.default_rng(0), set()))


def text_of(maze: Maze) -> str:
    side = len(maze.question)
    return Puzzle({"puzzle": "maze", "side": side}).write(maze.question.ravel().tolist())


def answers_to(model: Reasoner, paths: Sequence[Path], folder: Path) -> list[Prediction]:
    found = list(predict_files(model, paths, OutFolder(folder / "out")))
    assert not [each for each in found if isinstance(each, Failure)]
    return [each for each in found if isinstance(each, Prediction)]


def test_mazes_of_any_side_are_answered(of_mazes: Reasoner, tmp_path: Path) -> None:
    paths = []
    for side in (5, 7, 9):
        maze = drawn(side, 4)
        tokens, text = maze.question.ravel(), text_of(maze)
        paths.append(tmp_path / f"{side}.txt")
        paths[-1].write_text(text)
        board = torch.tensor(tokens.tolist())
        rows = board.view(side, side)
        for x in (text, paths[-1], tokens, board, rows, rows[None], rows.tolist(), tokens.tolist()):
            out = of_mazes.predict(x)
            assert out.prediction.question == text
            assert out.prediction.head_side == (0 if side == 5 else 5)
            assert out.state.y.shape == (1, side**2, 8)
    answers = answers_to(of_mazes, paths, tmp_path)
    assert [len(answer.data["answer"]) for answer in answers] == [29, 55, 89]
    assert ["trained on 5x5" in answer.text for answer in answers] == [False, True, True]
    assert of_mazes.net.cells == 25


def test_mazes_of_several_sides_may_be_in_one_file(of_mazes: Reasoner, tmp_path: Path) -> None:
    mazes = [text_of(drawn(side, 4)) for side in (7, 5, 7)]
    file = tmp_path / "mazes.txt"
    file.write_text("\n\n".join(mazes))
    answers = answers_to(of_mazes, [file], tmp_path)
    assert [answer.data["question"] for answer in answers] == mazes
    assert [answer.source for answer in answers] == [f"{file}:{k}" for k in (1, 2, 3)]


@pytest.mark.parametrize("side", [5, 7])
def test_spaces_at_the_end_of_rows_do_not_matter(of_mazes: Reasoner, side: int) -> None:
    text = text_of(drawn(side, 4))
    open_edge = "\n".join(row[:-1] + " " for row in text.splitlines())
    own = of_mazes.predict(open_edge).prediction.question
    for changed in (open_edge + "  ", "\n".join(map(str.rstrip, open_edge.splitlines()))):
        assert of_mazes.predict(changed).prediction.question == own


def test_a_copy_for_another_side_computes_the_same_at_the_same_side(of_mazes: Reasoner) -> None:
    tokens = torch.tensor(drawn(5, 4).question.ravel().tolist())[None]
    start = of_mazes.start(1, torch.Generator().manual_seed(1))
    nothing: Any = None
    assert for_side(of_mazes, 5) is of_mazes
    with torch.no_grad():
        back = for_side(for_side(of_mazes, 7), 5)
        assert back.predict(tokens).prediction.head_side == 0
        torch.testing.assert_close(back(tokens, start).state, of_mazes(tokens, start).state)
        with pytest.raises(ValueError, match="two tensors"):
            for_side(of_mazes, 7)(tokens.new_full((1, 49), 2), start)
        with pytest.raises(TypeError, match="two tensors, got"):
            of_mazes(tokens, States(nothing, nothing))


def test_a_copy_for_another_side_is_saved_as_such(tmp_path: Path) -> None:
    preset = find_preset("reason-maze13")
    model = preset.task.build().eval()
    model.preset, model.facts = preset, preset.task.facts()
    assert isinstance(model, Reasoner)
    model.search = replace(model.search, restarts=0)
    other = for_side(model, 7)
    other.save_pretrained(tmp_path / "saved")
    again = deq_zoo.load(tmp_path / "saved")
    assert isinstance(again, Reasoner)
    text = text_of(drawn(7, 4))
    assert again.predict(text, f_max_iter=2).prediction.question == text
    assert (again.net.cells, again.facts["side"], model.net.cells) == (49, 7, 169)


def test_texts_that_are_no_boards_are_errors(of_mazes: Reasoner) -> None:
    with pytest.raises(ZooError, match="maze of 2x2 cells, got 2 rows of up to 7"):
        of_mazes.predict("#######\n#S   G#")
    with pytest.raises(ZooError, match="maze of 5x5 cells, got 5 rows of up to 3"):
        of_mazes.predict("###\n#S#\n# #\n#G#\n###")
    with pytest.raises(ZooError, match="no maze in the text"):
        of_mazes.predict("")
    with pytest.raises(ZooError, match="25 cells, got 10"):
        of_mazes.predict([1] * 10)
    for x in (3.0, b"#####", None):
        with pytest.raises(ZooError, match="a text, a path, a list or a tensor"):
            of_mazes.predict(x)
    with pytest.raises(ZooError, match="whole numbers"):
        of_mazes.predict(torch.ones(7, 7, dtype=torch.bfloat16))
    with pytest.raises(ZooError, match="whole numbers"):
        of_mazes.predict(np.ones((2, 5, 5), dtype=int))


@pytest.mark.parametrize("side", [0, -5, 65])
def test_sides_beyond_the_limits_are_errors(of_mazes: Reasoner, side: int) -> None:
    with pytest.raises(ZooError, match=f"from 1 to 64 cells in a row, got {side}"):
        for_side(of_mazes, side)


@pytest.mark.parametrize("side", [True, 2.5, "7", torch.tensor(7)])
def test_a_side_is_a_whole_number(of_mazes: Reasoner, side: Any) -> None:
    with pytest.raises(TypeError, match="whole number"):
        for_side(of_mazes, side)


def test_other_networks_know_one_side(of_mazes: Reasoner) -> None:
    with pytest.raises(ZooError, match=r"boards of 4x4, got 6x6: only mazes"):
        for_side(make_model(), 6)
    learned = make_model(replace(NET, cells=25, position="learned"), deq={"eval_f_max_iter": 4})
    learned.facts = of_mazes.facts
    with pytest.raises(ZooError, match="maze of 5x5 cells, got 7 rows of up to 7"):
        learned.eval().predict(text_of(drawn(7, 4)))
