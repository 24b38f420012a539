"""Train a small equilibrium network on real digits and show what equilibria can do: `make demo`.

About a minute with live progress; leaves `demo/index.html`, and the report of the run beside it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

import deq_zoo
from deq_zoo.errors import ZooError
from deq_zoo.files import write_atomically
from deq_zoo.mdeq import MDEQClassifier
from deq_zoo.mdeq.pictures import gallery
from deq_zoo.training import Result
from examples.demo import converging, cost, maze, moving, page, solving
from examples.demo.cost import Cost
from examples.demo.page import Section

NAME, OUT, MAZE = "mdeq-quick", Path("demo"), "maze.txt"
_SHOWN = 24  # test digits


def main() -> None:
    console = Console()
    console.print(f"[bold]{NAME}[/bold]: an equilibrium network learns handwritten digits")
    result = deq_zoo.train(NAME, out=OUT, force=True, cpu=True)
    if not result.finished:
        return
    accuracy = f"{result.test['accuracy']:.1f} %"
    console.print(f"\n[bold]{accuracy}[/bold] of 1,000 test digits right, {result.seconds:.0f} s")
    with console.status("the same network unrolled, for comparison"):
        costs = cost.compare(NAME)
    with console.status("motion between two photographs"):
        motion = moving.show()
    with console.status("puzzles, step by step"):
        puzzle, larger = solving.show(), maze.show()
    write_atomically(OUT / MAZE, larger.text + "\n")
    puzzles = [_puzzle(puzzle), _maze(larger)]
    parts = [*_digits(), _costs(costs), _motion(motion), *puzzles, _more(result)]
    numbers = [
        (accuracy, "of 1,000 test digits right"),
        (f"{result.seconds:.0f} s", "of training on one core"),
        (f"{_ratio(costs):.1f} x", "less memory for the graph than unrolled"),
        (f"{motion.error:.1f} px", f"error of {moving.MODEL} on two photographs"),
    ]
    words = (
        "A deep equilibrium model has no stack of layers: its output is the state that its one "
        "layer no longer changes, z = f(z, x). This page was made on this machine."
    )
    path = OUT / "index.html"
    write_atomically(path, page.render("Networks that settle", words, numbers, parts))
    console.print(f"look at [bold]{path}[/bold], and at {result.run.report} for the run itself")


def _digits() -> list[Section]:
    model = deq_zoo.load(OUT)
    assert isinstance(model, MDEQClassifier)
    course, digits = converging.follow_digits(model)
    pixels, labels = digits.pixels, digits.labels
    row, few = converging.most_surprising(course, labels), slice(_SHOWN)
    return [
        Section(
            "An equilibrium converging",
            "The network that was just trained looks at a digit: its state "
            "changes less and less from one evaluation of f to the next, and the answer settles.",
            [converging.draw(course, pixels[row], row)],
        ),
        Section(
            "What it reads",
            "Digits that played no part in training, as they come.",
            [gallery(pixels[few], course.chance[-1, few], labels[few], digits.classes)],
        ),
    ]


def _costs(costs: dict[str, Cost]) -> Section:
    header = ["Training step", "Seconds", "MB that the graph keeps", "MB more at the peak"]
    rows = [
        [way, f"{each.seconds:.3f}", f"{each.graph / 1e6:.1f}", f"{each.peak / 1e6:.0f}"]
        for way, each in costs.items()
    ]
    return Section(
        "Beside the same network unrolled",
        "Unrolling keeps the activations of every evaluation for the backward pass. The implicit "
        "gradient needs those of one, however many evaluations the solve takes.",
        rows=[header, *rows],
    )


def _motion(shown: moving.Shown) -> Section:
    return Section(
        "Motion between two photographs",
        f"{moving.MODEL} comes with the package. Its mean error on this pair, which no training "
        f"saw, is {shown.error:.1f} pixels, where no motion at all has {shown.at_rest:.1f}.",
        shown.pictures,
        code=f"deq-zoo predict {moving.MODEL} a.png b.png --out flows",
    )


def _puzzle(shown: solving.Shown) -> Section:
    solved = shown.solved
    return Section(
        "A puzzle as an equilibrium",
        f"{solving.MODEL} comes with the package, too. Its answer to a Sudoku is a fixed point, "
        f"reached here in {solved.evaluations} evaluations, {100 * solved.head:.0f} % sure by its "
        f"own account; the answer {'obeys' if solved.valid else 'breaks'} the rules. The puzzle "
        "was picked for this page: of the hard ones in the test set, one that is solved quickly.",
        [shown.picture],
        code=f"echo {solving.PUZZLE} > puzzle.txt\ndeq-zoo predict {solving.MODEL} puzzle.txt",
    )


def _maze(shown: maze.Shown) -> Section:
    side, trained = f"{maze.SIDE}x{maze.SIDE}", f"{shown.trained}x{shown.trained}"
    all_of_them = f"of {maze.MAZES} mazes with paths as long"
    end = (
        f"right after {shown.steps} steps. It was picked, too: {all_of_them}, {shown.solved} are "
        f"solved within {maze.STEPS} steps, this one soonest."
        if shown.solved
        else f"still wrong in the end: {all_of_them}, none is solved within {maze.STEPS} steps."
    )
    return Section(
        "A larger board by more iterations",
        f"{maze.MODEL} was trained on mazes of {trained}. An equilibrium has no fixed depth: here "
        f"the same weights answer a maze of {side}, {end}",
        [shown.picture],
        code=f"deq-zoo predict {maze.MODEL} {OUT / MAZE}",
    )


def _more(result: Result) -> Section:
    return Section(
        "What next",
        f"The curves of the run are in {result.run.report.name} beside this page. More to try:",
        code="deq-zoo list --pretrained\n"
        "deq-zoo predict mdeq-digits photo.png\n"
        'deq-zoo sample lm-reference --prompt "Return the "\n'
        "deq-zoo doctor demo\n"
        "deq-zoo export demo --format onnx\n"
        "deq-zoo evaluate ignn-chains",
    )


def _ratio(costs: dict[str, Cost]) -> float:
    return costs["unrolled"].graph / costs["equilibrium"].graph


if __name__ == "__main__":
    try:
        main()
    except ZooError as error:
        sys.exit(str(error))
