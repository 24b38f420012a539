"""Networks whose cells see only the cells around them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from deq_zoo.errors import CheckpointError, ZooError
from deq_zoo.predictions import OutFolder
from deq_zoo.reason.convert import from_authors, to_authors
from deq_zoo.reason.exporting import make_export
from deq_zoo.reason.layers import Convolution, inner_width
from deq_zoo.reason.mazes import Maze, draw_mazes
from deq_zoo.reason.model import Reasoner
from deq_zoo.reason.prediction import predict_files
from deq_zoo.reason.puzzles import Puzzle
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
    mlp = make_model(NET).core.L_level.layers[0].mlp
    assert mlp.down_proj.weight.shape == (8, 24)  # type: ignore[union-attr]


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


def test_mazes_of_any_side_are_answered(of_mazes: Reasoner, tmp_path: Path) -> None:
    paths = []
    for side in (5, 7, 9):
        tokens = drawn(side, 4).question.ravel()
        text = Puzzle({"puzzle": "maze", "side": side}).write(tokens.tolist())
        paths.append(tmp_path / f"{side}.txt")
        paths[-1].write_text(text)
        board = torch.tensor(tokens.tolist())
        for x in (text, paths[-1], tokens, board, board.view(side, side), tokens.tolist()):
            out = of_mazes.predict(x)
            assert out.prediction.question == text
            assert out.state.y.shape == (1, side**2, 8)
    answers = list(predict_files(of_mazes, paths, OutFolder(tmp_path / "out")))
    assert [len(answer.data["answer"]) for answer in answers] == [29, 55, 89]  # type: ignore[union-attr]
    assert of_mazes.net.cells == 25


def test_a_copy_for_another_side_computes_the_same_at_the_same_side(of_mazes: Reasoner) -> None:
    tokens = torch.tensor(drawn(5, 4).question.ravel().tolist())[None]
    start = of_mazes.start(1, torch.Generator().manual_seed(1))
    with torch.no_grad():
        back = of_mazes.for_side(7).for_side(5)
        torch.testing.assert_close(back(tokens, start).state, of_mazes(tokens, start).state)
        with pytest.raises(ValueError, match="two tensors"):
            of_mazes.for_side(7)(tokens.new_full((1, 49), 2), start)


def test_texts_that_are_no_boards_are_errors(of_mazes: Reasoner) -> None:
    with pytest.raises(ZooError, match="mazes of 7x7 cells, got 2 rows"):
        of_mazes.predict("#######\n#S   G#")
    with pytest.raises(ZooError, match="no maze in the text"):
        of_mazes.predict("")
    with pytest.raises(ZooError, match="9 cells, got 10"):
        of_mazes.predict([1] * 10)
    with pytest.raises(ZooError, match="a text, a path, a list or a tensor"):
        of_mazes.predict(3.0)
    with pytest.raises(ValueError, match=r"mixer=mlp .* one size"):
        make_model().for_side(6)
