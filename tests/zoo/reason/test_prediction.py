"""Puzzles as text, and answers as users read them."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from deq_zoo.errors import ZooError
from deq_zoo.predictions import Failure, OutFolder, Prediction
from deq_zoo.reason.config import EQR_MAZE, HRM
from deq_zoo.reason.prediction import predict_files
from deq_zoo.reason.puzzles import Checked, Puzzle, puzzle_facts
from deq_zoo.reason.search import Search
from deq_zoo.reason.service import PuzzleAnswers
from tests.zoo.reason.inputs import PUZZLES, predict_inputs
from tests.zoo.reason.nets import SETTLING, make_model

FOUR = Puzzle({"puzzle": "sudoku", "side": 4})
MAZE = Puzzle({"puzzle": "maze", "side": 5})
WAY = ["#####", "#S  #", "### #", "#G  #", "#####"]


def test_a_sudoku_is_read_with_and_without_its_frame() -> None:
    plain = FOUR.read(PUZZLES[0])
    framed = "+----+\n|1 .|. .|\n|0 _|3 *|\n|. 4|. ?|\n|. .|2 .|\n"
    assert FOUR.read(framed) == plain
    assert FOUR.read("\n".join(PUZZLES)) == [*plain, *FOUR.read(PUZZLES[1])]
    assert FOUR.write(plain[0]) == "1...\n..3.\n.4..\n..2."


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("12..", "16 cells, got 4"),
        ("", "16 cells, got 0"),
        ("5...............", "cell 1 is '5'.*1 to 4"),
        ("hello", "cell 1 is 'h'"),
    ],
)
def test_other_texts_are_errors(text: str, complaint: str) -> None:
    with pytest.raises(ZooError, match=complaint):
        FOUR.read(text)


def test_an_impossible_sudoku_is_refused_with_its_reason() -> None:
    with pytest.raises(ZooError, match="1 is in row 1, column 1 and in row 1, column 2"):
        FOUR.check(FOUR.read("11..............")[0])
    with pytest.raises(ZooError, match="no digits for the blank cells fit"):
        FOUR.check(FOUR.read("123........4....")[0])


def test_several_solutions_are_noticed() -> None:
    checked = FOUR.check(FOUR.read("12....1221.....1")[0])
    assert checked.ambiguous
    assert not FOUR.check(FOUR.read(PUZZLES[0])[0]).ambiguous


def test_a_board_with_few_givens_that_has_no_solution_is_refused_at_once() -> None:
    nine = Puzzle({"puzzle": "sudoku", "side": 9})
    text = ".....5.8....6.1.43..........1.5........1.6...3.......553.....61........4........."
    began = time.process_time()
    with pytest.raises(ZooError, match="no digits for the blank cells fit"):
        nine.check(nine.read(text)[0])
    assert time.process_time() - began < 1.0


def test_an_answer_must_keep_the_givens_and_obey_the_rules() -> None:
    (question,) = FOUR.read(PUZZLES[0])
    (solution,) = FOUR.check(question).solutions
    assert FOUR.obeys(question, solution)
    other = FOUR.check(FOUR.read(PUZZLES[1])[0]).solutions[0]
    assert not FOUR.obeys(question, other)
    assert not FOUR.obeys(question, question)
    broken = list(solution)
    broken[1] = broken[2]
    assert not FOUR.obeys(question, broken)


def test_a_maze_is_read_checked_and_its_path_is_verified() -> None:
    (question,) = MAZE.read("\n".join(WAY))
    checked = MAZE.check(question)
    assert (checked.moves, checked.ambiguous) == (6, False)
    (answer,) = checked.solutions
    assert MAZE.write(answer) == "#####\n#Soo#\n###o#\n#Goo#\n#####"
    assert MAZE.obeys(question, answer)
    assert not MAZE.obeys(question, question)
    through = list(answer)
    through[11] = 5
    assert not MAZE.obeys(question, through)
    two = MAZE.read("\n".join([*WAY, "", *WAY]))
    assert two == [question, question]


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        (WAY[:4], "5x5 cells, got 4 rows"),
        ([*WAY[:4], "######"], "5x5 cells"),
        ([*WAY[:4], "##x##"], "'x'"),
        ([*WAY[:4], "##S##"], "got 2 and 1"),
        ([], "no maze"),
    ],
)
def test_other_mazes_are_errors(lines: list[str], complaint: str) -> None:
    with pytest.raises(ZooError, match=complaint):
        MAZE.read("\n".join(lines))
    with pytest.raises(ZooError, match="no way leads from S to G"):
        MAZE.check(MAZE.read("\n".join([*WAY[:3], "#G# #", "#####"]))[0])


def test_a_row_of_free_cells_does_not_separate_mazes() -> None:
    maze = ["#####", "#S# #", "     ", "#G# #", "#####"]
    (question,) = MAZE.read("\n".join(maze))
    assert MAZE.write(question) == "\n".join(maze)
    stripped = [line.rstrip() for line in maze]
    assert MAZE.read("\n".join(stripped)) == [question]
    for gap in ([""], []):
        assert MAZE.read("\n".join([*stripped, *gap, *stripped])) == [question] * 2
        assert MAZE.read("\n".join([*maze, *gap, *maze])) == [question] * 2
    assert MAZE.read("\n".join(["", *WAY, "  ", "", *WAY, ""])) == MAZE.read("\n".join(WAY)) * 2


@pytest.mark.parametrize(("old", "new", "counts"), [(3, 2, "0 and 1"), (2, 4, "1 and [0-9]+")])
def test_a_maze_of_tokens_needs_one_start_and_one_goal(old: int, new: int, counts: str) -> None:
    net = replace(SETTLING, cells=25)
    model = make_model(net)
    model.facts = {"puzzle": "maze", "side": 5}
    tokens = [new if token == old else token for token in MAZE.read("\n".join(WAY))[0]]
    for x in (tokens, torch.tensor(tokens)):
        with pytest.raises(ZooError, match=f"one start S and one goal G, got {counts}"):
            model.predict(x)


def test_the_kind_of_puzzle_follows_from_the_shape() -> None:
    assert puzzle_facts(SETTLING) == {"puzzle": "sudoku", "side": 4}
    assert puzzle_facts(HRM) == {"puzzle": "sudoku", "side": 9}
    assert puzzle_facts(EQR_MAZE) == {"puzzle": "maze", "side": 30}
    four = torch.tensor([[1, 1, 1, 1, 1, 3, 5, 1, 1, 1, 4, 1, 1, 1, 1, 1]])
    assert puzzle_facts(SETTLING, four) == {"puzzle": "maze", "side": 4}
    solved = torch.tensor([[2, 3, 4, 5, 4, 5, 2, 3, 3, 2, 5, 4, 5, 4, 3, 2]])
    assert puzzle_facts(SETTLING, solved) == {"puzzle": "sudoku", "side": 4}
    with pytest.raises(ZooError, match="which puzzles"):
        Puzzle({})


def test_one_puzzle_may_be_text_digits_or_tokens(tmp_path: Path) -> None:
    model = make_model()
    digits = [0 if c == "." else int(c) for c in PUZZLES[0]]
    (tmp_path / "one.txt").write_text(PUZZLES[0], encoding="utf-8-sig")  # with a mark in front
    found = [
        model.predict(x)
        for x in (PUZZLES[0], tmp_path / "one.txt", digits, torch.tensor(digits) + 1)
    ]
    assert len({out.prediction for out in found}) == 1
    solved = found[0].prediction
    assert solved.question == "1...\n..3.\n.4..\n..2."
    assert solved.right is False
    assert solved.attempts == 1
    again = model.predict(PUZZLES[0], found[0].state)
    assert again.prediction.evaluations < solved.evaluations
    assert again.prediction.answer == solved.answer
    with pytest.raises(ZooError, match="impossible"):
        model.predict("11..............")
    with pytest.raises(ZooError, match="one puzzle, got 2"):
        model.predict("\n".join(PUZZLES))
    with pytest.raises(ZooError, match="16 cells"):
        model.predict([1, 2])
    with pytest.raises(ZooError, match="tokens from 1 to 5"):
        model.predict([9] * 16)


def test_numbers_may_be_a_board_and_must_be_whole() -> None:
    model = make_model()
    digits = [0 if c == "." else int(c) for c in PUZZLES[0]]
    expected = model.predict(digits).prediction
    board = [digits[k : k + 4] for k in range(0, 16, 4)]
    tokens = torch.tensor(digits) + 1
    for x in (
        board, np.array(digits), np.array(board), tokens.view(4, 4), tokens.view(1, 16),
        tokens.view(1, 4, 4), tokens.to(torch.uint8), list(np.array(digits)),
    ):  # fmt: skip
        assert model.predict(x).prediction == expected
    for x in (
        [1.9, *digits[1:]], [True, *digits[1:]], tokens.double(), tokens > 1, np.array(board) / 2,
        [[*row, 0] for row in board], tokens.view(2, 8), ["1", *digits[1:]],
    ):  # fmt: skip
        with pytest.raises(ZooError, match="whole numbers"):
            model.predict(x)
    with pytest.raises(ZooError, match="a text, a path, a list or a tensor, got float"):
        model.predict(3.0)


def test_a_puzzle_that_does_not_converge_is_tried_again() -> None:
    model = make_model(deq={"eval_f_max_iter": 2})
    model.search = Search(restarts=3)
    out = model.predict(PUZZLES[0])
    assert (out.prediction.attempts, out.prediction.evaluations) == (4, 8)
    more = model.predict(PUZZLES[0], f_max_iter=300)
    assert more.prediction.attempts == 1


@pytest.mark.parametrize(
    "search",
    [
        Search(restarts=3),
        Search(halt="head", restarts=2),
        Search(halt="both", restarts=2, choose="vote"),
        Search(restarts=4, choose="vote", seed=2),
    ],
    ids=str,
)
def test_python_command_line_and_server_give_the_same_answer(
    search: Search, tmp_path: Path
) -> None:
    model = make_model(deq={"eval_f_max_iter": 2}).eval()
    model.search = search
    (tmp_path / "puzzles.txt").write_text("\n".join(PUZZLES))
    lines = list(predict_files(model, [tmp_path / "puzzles.txt"], OutFolder(tmp_path / "out")))
    service = PuzzleAnswers(model)
    for line, puzzle in zip(lines, PUZZLES, strict=True):
        assert isinstance(line, Prediction)
        out = model.predict(puzzle)
        served = service.answer({"puzzle": puzzle})
        assert out.prediction.answer == line.data["answer"] == served["prediction"]
        assert out.stats is not None
        assert out.stats.nfe == line.data["evaluations"] == served["evaluations"]
        assert out.prediction.attempts == line.data["attempts"] == served["attempts"]
        assert line.data["settled"] is served["settled"]
        assert served["residual"] == pytest.approx(line.data["residual"], rel=1e-4)


def test_a_prediction_takes_no_other_options_of_a_call() -> None:
    with pytest.raises(TypeError, match="f_max_iter alone, got sradius_mode"):
        make_model().predict(PUZZLES[0], sradius_mode=True)


def test_files_of_puzzles_give_answers_and_reasons(tmp_path: Path) -> None:
    model = make_model()
    good, broken = predict_inputs(tmp_path)
    results = list(predict_files(model, [*good, *broken], OutFolder(tmp_path / "out")))
    answers = [result for result in results if isinstance(result, Prediction)]
    failures = [result for result in results if isinstance(result, Failure)]
    assert [answer.source for answer in answers] == [
        str(good[0]),
        f"{good[1]}:1",
        f"{good[1]}:2",
    ]
    assert all("evaluations" in answer.text for answer in answers)
    assert answers[0].data["settled"] is True
    assert "not solved: the answer breaks the rules" in answers[0].text
    assert "more than one solution" in answers[0].text
    assert "impossible" in failures[0].reason
    assert "16 cells" in failures[1].reason
    assert "no text file" in failures[2].reason
    assert Checked((1,)).solutions == ()
