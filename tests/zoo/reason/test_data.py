"""Puzzles: boards, symmetries, orbits, mazes, and data sets on disk."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deq_zoo.errors import DataError
from deq_zoo.reason.boards import (
    BOARDS,
    Board,
    TooHard,
    add_givens,
    all_solutions,
    conflict,
    dig,
    draw_grid,
    find_solutions,
    solve_board,
)
from deq_zoo.reason.files import read_csv, read_folder
from deq_zoo.reason.mazes import FREE, GOAL, START, WALL, draw_mazes, solve_maze
from deq_zoo.reason.minimal import minimal_puzzles
from deq_zoo.reason.sets import CACHE, Sizes, make_mazes, make_sudokus, split_of
from deq_zoo.reason.symmetry import (
    Symmetry,
    _cell_orders,
    augment,
    draw_published,
    maze_orbit,
    orbit,
)
from tests.golden import FOLDER, load_tensors, select

GOLDEN = FOLDER / "reason"
IO = load_tensors("reason", "common_io")
SOLVED = "1234341221434321"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))


def try_everything(board: Board, question: list[int]) -> list[tuple[int, ...]]:
    """Return the solutions by trying every digit in every cell, in order."""
    blank = next((k for k, digit in enumerate(question) if not digit), None)
    if blank is None:
        return [tuple(question)] if conflict(board, question) is None else []
    found = []
    for digit in range(1, board.side + 1):
        tried = [*question[:blank], digit, *question[blank + 1 :]]
        if conflict(board, tried) is None:
            found += try_everything(board, tried)
    return found


def without_spare_givens(board: Board, question: tuple[int, ...]) -> set[tuple[int, ...]]:
    """Return the minimal puzzles within a puzzle, by dropping givens in every order."""
    fewer = [(*question[:k], 0, *question[k + 1 :]) for k, digit in enumerate(question) if digit]
    proper = [each for each in fewer if solve_board(board, each).unique]
    return set().union(*(without_spare_givens(board, each) for each in proper)) or {question}


class TestBoards:
    def test_the_solver_agrees_with_trying_everything(self) -> None:
        board, rng = BOARDS[4], random.Random(1)
        for _ in range(30):
            question = [digit if rng.random() < 0.35 else 0 for digit in draw_grid(board, rng)]
            if rng.random() < 0.3:
                question[rng.randrange(16)] = rng.randint(1, 4)  # may contradict the others
            expected = try_everything(board, question)
            found = solve_board(board, question).solutions
            assert len(found) == min(2, len(expected))
            assert set(found) <= set(expected)
            narrow = find_solutions(board, question, 1000)
            assert len(narrow) == len(found)
            assert set(narrow) <= set(expected)

    @pytest.mark.parametrize("side", BOARDS)
    def test_a_dug_puzzle_has_its_solution_alone_and_no_given_too_many(self, side: int) -> None:
        board, rng = BOARDS[side], random.Random(2)
        grid = draw_grid(board, rng)
        assert conflict(board, grid) is None
        question = dig(board, grid, rng)
        assert solve_board(board, question).solutions == (grid,)
        givens = [k for k, digit in enumerate(question) if digit]
        for cell in givens[:8]:
            fewer = [0 if k == cell else digit for k, digit in enumerate(question)]
            assert not solve_board(board, fewer).unique
        more = add_givens(question, grid, rng, 3)
        assert sum(map(bool, more)) == len(givens) + 3
        assert add_givens(question, grid, rng, board.cells) == grid

    def test_an_impossible_puzzle_has_no_solution(self) -> None:
        question = [1, 2, 3, 0, *[0] * 4, 0, 0, 0, 4, *[0] * 4]
        assert conflict(BOARDS[4], question) is None
        assert solve_board(BOARDS[4], question).solutions == ()
        assert solve_board(BOARDS[4], [1, 1, *[0] * 14]).solutions == ()

    def test_a_hard_puzzle_needs_guesses_and_a_search_can_be_limited(self) -> None:
        # A well-known hard one: singles alone lead nowhere.
        text = "8..........36......7..9.2...5...7.......457.....1...3...1....68..85...1..9....4.."
        question = [0 if c == "." else int(c) for c in text]
        solved = solve_board(BOARDS[9], question)
        assert solved.unique
        assert solved.guesses > 5
        assert find_solutions(BOARDS[9], question, 1000) == solved.solutions
        with pytest.raises(TooHard):
            solve_board(BOARDS[9], question, most_guesses=3)


class TestSymmetry:
    def test_golden_augmentations_are_reproduced(self) -> None:
        io = select(IO, "sudoku_aug/")
        rng = np.random.RandomState(42)
        for k in range(3):
            drawn = draw_published(rng, BOARDS[9])
            assert drawn.digits[1:].tolist() == io["digit_perm"][k].tolist()
            assert drawn.transpose == bool(io["transpose_u"][k] < 0.5)
            assert drawn.rows.tolist() == io["row_perm"][k].tolist()
            assert drawn.columns.tolist() == io["col_perm"][k].tolist()
            for before, after in (("board", "out_boards"), ("solution", "out_solutions")):
                changed = drawn.apply(io[before].numpy().astype(np.int64))
                assert changed.tolist() == io[after][k].tolist()

    @pytest.mark.parametrize("side", BOARDS)
    def test_augmented_puzzles_are_proper_and_stay_in_their_orbit(self, side: int) -> None:
        board, rng = BOARDS[side], random.Random(3)
        grid = draw_grid(board, rng)
        question = dig(board, grid, rng)
        rows = [torch.tensor([list(g)] * 6, dtype=torch.uint8) + 1 for g in (question, grid)]
        tokens, labels = augment(board, rows, torch.Generator().manual_seed(0))
        assert tokens.dtype == torch.uint8
        assert len({tuple(row) for row in labels.tolist()}) > 1
        for row, answer in zip((tokens - 1).tolist(), (labels - 1).tolist(), strict=True):
            assert solve_board(board, row).solutions == (tuple(answer),)
            assert orbit(board, answer) == orbit(board, grid)
            if side < 9:
                assert orbit(board, row) == orbit(board, question)

    def test_unscored_cells_move_with_an_augmented_board(self) -> None:
        board = BOARDS[4]
        grid = torch.tensor([draw_grid(board, random.Random(5))] * 5, dtype=torch.int16) + 1
        labels = grid.clone()
        labels[:, :3] = -100
        whole, some = augment(board, (grid, labels), torch.Generator().manual_seed(0))
        assert some.dtype == torch.int16
        assert ((some == whole) | (some == -100)).all()
        assert (some == -100).sum(1).tolist() == [3] * 5

    def test_the_number_of_orbits_is_the_known_one(self) -> None:
        """Solved boards of four digits: all 288 of them are in two orbits."""
        board = BOARDS[4]
        grids = try_everything(board, [1, 2, 3, 4, *[0] * 12])
        assert len(grids) == 12
        names = list(permutations(range(1, 5)))
        every = {tuple(digits[d - 1] for d in grid) for digits in names for grid in grids}
        assert len(every) == 288
        assert len({orbit(board, grid) for grid in grids}) == 2

    def test_six_digits_have_at_most_49_orbits(self) -> None:
        rng = random.Random(4)
        keys = {orbit(BOARDS[6], draw_grid(BOARDS[6], rng)) for _ in range(60)}
        assert 15 < len(keys) <= 49

    def test_a_symmetry_changes_rows_columns_and_digits(self) -> None:
        grid = np.arange(16).reshape(4, 4) % 5
        lines = np.array([2, 3, 0, 1])
        same = Symmetry(np.arange(5), True, np.arange(4), np.arange(4))
        assert (same.apply(grid) == grid.T).all()
        turned = Symmetry(np.array([0, 2, 1, 4, 3]), False, lines, np.arange(4))
        assert turned.apply(grid)[0].tolist() == [4, 3, 0, 2]


class TestMazes:
    def test_golden_mazes_are_reproduced(self) -> None:
        io = select(IO, "maze8/")
        rng = np.random.default_rng(42)
        first = np.random.default_rng(42).integers(0, 100, 8)
        assert first.tolist() == io["first_integers_0_100"].tolist()
        source = draw_mazes(8, (6, 12), rng, set())
        for k in range(2):
            maze = next(source)
            assert maze.question.ravel().tolist() == io["inputs"][k].tolist()
            assert maze.answer.ravel().tolist() == io["labels"][k].tolist()

    def test_golden_data_set_of_mazes_is_reproduced(self) -> None:
        source = draw_mazes(9, (6, 14), np.random.default_rng(42), set())
        for split in ("train", "test"):  # as published, in the order in which they are drawn
            theirs = read_folder(GOLDEN / "maze-9x9-5", split)
            ours = [next(source) for _ in range(5)][: len(theirs)]
            assert ours
            for maze, tokens, labels in zip(ours, theirs.tokens, theirs.labels, strict=True):
                assert maze.question.ravel().tolist() == tokens.tolist()
                assert maze.answer.ravel().tolist() == labels.tolist()

    def test_the_split_of_a_maze_does_not_depend_on_the_sizes(self) -> None:
        few, many = (make_mazes(9, (6, 14), Sizes(n, 3, 20), 0) for n in (30, 90))
        assert torch.equal(few.test.tokens, many.test.tokens)
        assert torch.equal(few.train.tokens, many.train.tokens[:30])
        other = make_mazes(9, (6, 14), Sizes(60, 0, 0), 1)
        assert len(other.val) == 0
        assert other.val.tokens.shape == (0, 81)
        for part, name in ((many.train, "train"), (many.test, "test"), (other.train, "train")):
            assert {split_of(maze_orbit(row)) for row in part.tokens.tolist()} == {name}

    def test_a_turned_mirrored_or_reversed_maze_is_in_the_same_orbit(self) -> None:
        maze = next(draw_mazes(9, (6, 14), np.random.default_rng(3), set())).question
        key = maze_orbit(maze.ravel().tolist())
        back = maze.copy()
        back[maze == START], back[maze == GOAL] = GOAL, START
        for image in (np.rot90(maze), maze[::-1], maze.T, back, np.fliplr(back)):
            assert maze_orbit(image.ravel().tolist()) == key
        other = next(draw_mazes(9, (6, 14), np.random.default_rng(4), set())).question
        assert maze_orbit(other.ravel().tolist()) != key

    def test_a_maze_has_one_path_of_the_wanted_length(self) -> None:
        source = draw_mazes(13, (8, 20), np.random.default_rng(0), set())
        for _ in range(5):
            maze = next(source)
            solution = solve_maze(maze.question)
            assert solution is not None
            assert solution.unique
            assert 8 <= solution.moves <= 20
            assert (solution.answer == maze.answer).all()

    def test_two_paths_and_none_are_told_apart(self) -> None:
        open_room = np.full((4, 4), FREE, dtype=np.uint8)
        open_room[0, 0], open_room[1, 1] = START, GOAL
        solution = solve_maze(open_room)
        assert solution is not None
        assert (solution.moves, solution.unique) == (2, False)
        open_room[0, 1] = open_room[1, 0] = WALL
        assert solve_maze(open_room) is None

    def test_paths_that_no_maze_has_are_an_error(self) -> None:
        with pytest.raises(DataError, match="path of 20 moves"):
            make_mazes(5, (20, 20), Sizes(1, 0, 0), 0)


class TestSets:
    def test_no_orbit_is_in_two_splits(self) -> None:
        board = BOARDS[6]
        splits = make_sudokus(6, Sizes(12, 4, 6), seed=1, extra=2)
        for name, part in splits._asdict().items():
            assert len(part) == {"train": 12, "val": 4, "test": 6}[name]
            for row in (part.labels - 1).tolist():
                assert split_of(orbit(board, row)) == name
            for row in (part.tokens - 1).tolist():
                assert solve_board(board, row).unique

    def test_no_puzzle_of_four_digits_is_one_of_another_split_with_more_givens(self) -> None:
        board = BOARDS[4]
        splits = make_sudokus(4, Sizes(40, 8, 20), seed=0, extra=2)
        orbits = {
            name: {
                orbit(board, each)
                for row in (part.tokens - 1).tolist()
                for each in without_spare_givens(board, tuple(row))
            }
            for name, part in splits._asdict().items()
        }
        assert all(orbits.values())
        assert not orbits["train"] & orbits["test"]
        assert not (orbits["train"] | orbits["test"]) & orbits["val"]
        givens = {int(n) for n in (splits.test.tokens > 1).sum(1)}
        assert len(givens) > 1

    def test_all_minimal_puzzles_within_a_puzzle_are_listed(self) -> None:
        board, rng = BOARDS[4], random.Random(7)
        for _ in range(6):
            grid = draw_grid(board, rng)
            question = add_givens(dig(board, grid, rng), grid, rng, 3)
            listed = list(minimal_puzzles(board, question, grid))
            assert len(listed) == len(set(listed))
            assert set(listed) == without_spare_givens(board, question)

    @pytest.mark.slow
    def test_all_49_orbits_of_six_digits_are_dealt_out_in_fair_shares(self) -> None:
        board, counts, shares = BOARDS[6], Counter[str](), Counter[str]()
        left = set(all_solutions(board, [*range(1, 7), *[0] * 30]))
        boards = len(left)
        while left:
            grid = next(iter(left))
            images = np.array(grid)[_cell_orders(board)]
            names = np.argsort(images[:, :6], axis=1) + 1  # so that the first row is 1 to 6 again
            members = set(map(tuple, np.take_along_axis(names, images - 1, axis=1).tolist()))
            assert members <= left
            left -= members
            split = split_of(orbit(board, grid))
            counts[split] += 1
            shares[split] += len(members)
        assert counts == {"val": 5, "test": 10, "train": 34}
        assert boards == 39_168
        assert 0.08 < shares["val"] / boards < 0.15
        assert 0.15 < shares["test"] / boards < 0.25

    def test_a_seed_gives_the_same_puzzles_and_another_seed_others(self) -> None:
        a, b, c = (make_sudokus(4, Sizes(6, 1, 1), seed) for seed in (1, 1, 2))
        assert torch.equal(a.train.tokens, b.train.tokens)
        assert not torch.equal(a.train.tokens, c.train.tokens)

    def test_a_set_that_took_long_is_kept(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("deq_zoo.reason.sets._SLOW", 0.0)
        first = make_sudokus(4, Sizes(6, 1, 1), 5)
        (path,) = (tmp_path / "cache" / "reason").iterdir()
        monkeypatch.setattr("deq_zoo.reason.sets._fill", None)  # would raise if it were called
        again = make_sudokus(4, Sizes(6, 1, 1), 5)
        assert torch.equal(first.test.labels, again.test.labels)
        monkeypatch.undo()
        monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
        path.write_bytes(b"damaged")
        repaired = make_sudokus(4, Sizes(6, 1, 1), 5)
        assert torch.equal(first.train.tokens, repaired.train.tokens)

    def test_too_few_puzzles_are_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("deq_zoo.reason.sets._PATIENCE", 2)
        with pytest.raises(DataError, match="too few different puzzles"):
            make_sudokus(4, Sizes(1, 30, 1), 0)


class TestFiles:
    def test_a_published_folder_is_read(self) -> None:
        train = read_folder(GOLDEN / "sudoku-5", "train")
        assert train.tokens.shape == (15, 81)
        assert train.groups.tolist() == [0, 3, 6, 9, 12, 15]  # the puzzle and two variants
        given = train.tokens > 1
        assert torch.equal(train.tokens[given].long(), train.labels[given].long())
        test = read_folder(GOLDEN / "sudoku-5", "test")
        csv = read_csv(GOLDEN / "sudoku_test.csv")
        assert torch.equal(test.tokens, csv.tokens)
        assert torch.equal(test.labels.long(), csv.labels.long())

    def test_easy_puzzles_of_a_csv_file_can_be_left_out(self) -> None:
        whole = read_csv(GOLDEN / "sudoku_train.csv")
        hard = read_csv(GOLDEN / "sudoku_train.csv", min_rating=int(whole.rating.max()))
        assert 0 < len(hard) <= len(whole)
        with pytest.raises(DataError, match="no puzzles rated"):
            read_csv(GOLDEN / "sudoku_train.csv", min_rating=10**6)

    @pytest.mark.parametrize(
        ("text", "complaint"),
        [
            ("source,question,answer,rating\na,,1,0\n", "no question"),
            (f"source,question,answer,rating\na,{'1' * 80}x,{'1' * 81},0\n", "character"),
            (f"source,question,answer,rating\na,{'1' * 81},{'1' * 16},0\n", "differ in size"),
            (f"source,question,answer,rating\na,{'1' * 81},{'1' * 81},hard\n", "whole number"),
        ],
    )
    def test_a_broken_csv_file_is_an_error(self, text: str, complaint: str, tmp_path: Path) -> None:
        (tmp_path / "a.csv").write_text(text)
        with pytest.raises(DataError, match=complaint):
            read_csv(tmp_path / "a.csv")

    def write_csv(self, path: Path, rows: list[tuple[str, str]], mark: str = "") -> Path:
        lines = ["source,question,answer,rating", *(f"a,{q},{a},3" for q, a in rows)]
        path.write_text(mark + "\n".join(lines), encoding="utf-8")
        return path

    @pytest.mark.parametrize(
        ("wrong", "complaint"),
        [
            (("2" + "." * 15, SOLVED), r"a\.csv:3: the answer changes a given"),
            (("1" + "." * 15, SOLVED[:-1] + "2"), r"a\.csv:3: the answer breaks the rules"),
            (("." * 16, "." * 16), r"a\.csv:3: the answer breaks the rules"),
            (("9" + "." * 15, "9" + SOLVED[1:]), r"a\.csv:3: the answer breaks the rules"),
        ],
    )
    def test_a_csv_file_with_a_wrong_answer_is_an_error(
        self, wrong: tuple[str, str], complaint: str, tmp_path: Path
    ) -> None:
        good = ("1" + "." * 15, SOLVED)
        assert len(read_csv(self.write_csv(tmp_path / "good.csv", [good, good], "\ufeff"))) == 2
        with pytest.raises(DataError, match=complaint):
            read_csv(self.write_csv(tmp_path / "a.csv", [good, wrong]))

    @pytest.mark.parametrize(
        ("question", "answer", "complaint"),
        [
            ("#####S  ##G ####", "#####So ##G ####", None),
            ("#####S  ##S ####", "#####So ##S ####", "one start S and one goal G"),
            ("#####S  ##G ####", "###o#So ##G ####", "changes a cell that is not free"),
            ("#####S  ##G ####", "#####S  ##G ####", "no shortest path"),
            ("#####S  ##G ####", "#####Soo##Go####", "no shortest path"),
        ],
    )
    def test_mazes_of_a_csv_file_are_checked(
        self, question: str, answer: str, complaint: str | None, tmp_path: Path
    ) -> None:
        path = self.write_csv(tmp_path / "a.csv", [(question, answer)])
        if complaint is None:
            assert len(read_csv(path)) == 1
            return
        with pytest.raises(DataError, match=complaint):
            read_csv(path)

    @pytest.mark.parametrize(
        ("file", "place", "value", "complaint"),
        [
            ("labels", (4, 0), 3, "example 4: the answer"),
            ("puzzle_identifiers", 2, -1, "puzzle 2 has the identifier -1"),
        ],
    )
    def test_a_folder_with_wrong_numbers_is_an_error(
        self, file: str, place: Any, value: int, complaint: str, tmp_path: Path
    ) -> None:
        shutil.copytree(GOLDEN / "sudoku-5", tmp_path / "data")
        path = tmp_path / "data" / "train" / f"all__{file}.npy"
        array = np.load(path).astype(np.int64)
        assert array[place] != value
        array[place] = value
        np.save(path, array)
        with pytest.raises(DataError, match=complaint):
            read_folder(tmp_path / "data", "train")

    def test_a_broken_folder_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"dataset\.json"):
            read_folder(tmp_path, "train")
        shutil.copytree(GOLDEN / "sudoku-5", tmp_path / "data")
        folder = tmp_path / "data" / "train"
        np.save(folder / "all__group_indices.npy", np.array([0, 99]))
        with pytest.raises(DataError, match="do not belong together"):
            read_folder(tmp_path / "data", "train")
        facts = json.loads((folder / "dataset.json").read_text())
        (folder / "dataset.json").write_text(json.dumps(facts | {"vocab_size": 5}))
        with pytest.raises(DataError, match="tokens outside"):
            read_folder(tmp_path / "data", "train")
