"""Run the benchmarks: tables on the screen, the numbers and pictures in `results/`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

from benchmarks import adjoint, memory, overhead, passes, to_tolerance, training
from benchmarks.cases import LARGE, SOLVED
from benchmarks.contest import OLD, Contest, open_contest
from benchmarks.picture import draw, draw_gradients
from benchmarks.storing import RESULTS, store

QUICK = ("mlp", "pair")  # a sanity run
GRADIENTS = ("adjoint", "passes", "training")
SEEDS = {"solvers": (0,), "gradients": (0, 1, 3, 7)}  # of cases, cotangents and spectra
T = TypeVar("T")


def main() -> int:
    """Run the benchmarks; return an error code if a contestant failed."""
    options = _options()
    rounds = options.rounds or (1 if options.quick else 9)
    with open_contest() as contest:
        print(f"one thread, up to {rounds} rounds, contestants in turns\n", flush=True)
        if options.only in (None, *SOLVED):
            _solves(contest, options, rounds)
        if options.only in (None, "gradients", *GRADIENTS):
            _gradients(contest, options, rounds)
        for failure in contest.failures:
            print(f"FAILED: {failure}")
        return 1 if contest.failures else 0


def _solves(contest: Contest, options: argparse.Namespace, rounds: int) -> None:
    """Measure the cost, the convergence and the memory of solvers."""
    cases = [name for name in SOLVED if options.only in (None, name)]
    if options.quick:
        cases = [name for name in cases if name in QUICK]
    start = perf_counter()
    cost = _shown(overhead.run(contest, cases, rounds))
    speed = _shown(to_tolerance.run(contest, cases, rounds))
    space = _shown(memory.run(contest, "conv" if options.quick else LARGE))
    answers = {
        "geometric_mean": {"rounds": cost.mean, "minima": cost.mean_low},
        "overhead": asdict(cost),
        "to_tolerance": asdict(speed),
        "memory": asdict(space),
    }
    name = "partial" if options.quick or options.only else "solvers"
    _save(name, contest, rounds, start, answers, lambda path: draw(cost, speed, space, path))


def _gradients(contest: Contest, options: argparse.Namespace, rounds: int) -> None:
    """Measure the cost of gradients."""
    quick, start = options.quick, perf_counter()
    asked = GRADIENTS if options.only in (None, "gradients") else (options.only,)
    systems = _shown(adjoint.run(contest, quick)) if "adjoint" in asked else None
    methods = _shown(passes.run(contest, rounds, quick)) if "passes" in asked else None
    steps = _shown(training.run(contest, rounds, quick)) if "training" in asked else None
    if systems is None or methods is None or steps is None:
        return  # a look at one of them, which is not kept

    def picture(path: Path) -> None:
        draw_gradients(systems, methods, steps, path)

    answers = {"adjoint": asdict(systems), "passes": asdict(methods), "training": asdict(steps)}
    name = "partial.gradients" if quick else "gradients"
    _save(name, contest, rounds, start, answers, picture)


def _shown(answer: T) -> T:
    print(answer, end="\n\n", flush=True)
    return answer


def _save(
    name: str,
    contest: Contest,
    rounds: int,
    start: float,
    answers: dict[str, Any],
    picture: Callable[[Path], None],
) -> None:
    seconds = perf_counter() - start
    facts = {"contestant": f"torchdeq {OLD}", "rounds": rounds, "seconds": seconds}
    everything = {**facts, **answers, "failures": contest.failures}
    seeds = SEEDS["gradients" if "gradients" in name else "solvers"]
    store(RESULTS / f"{name}.json", everything, seeds, threads=1)
    _replace(RESULTS / f"{name}.png", picture)
    print(f"{seconds:.0f} s; numbers and picture in {RESULTS.name}/{name}.json and .png")
    print("`python -m tools.tables` renews the tables of the documentation\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    choices = [*SOLVED, "gradients", *GRADIENTS]
    parser.add_argument(
        "--only", choices=choices, metavar="WHAT", help=f"one of {', '.join(choices)}"
    )
    parser.add_argument("--rounds", type=int, metavar="N", help="turns per contestant (9)")
    parser.add_argument("--quick", action="store_true", help="a minute or two, small cases only")
    return parser.parse_args()


def _replace(path: Path, write: Callable[[Path], None]) -> None:
    """Write a file under another name first, so that a killed run leaves the old file whole."""
    part = path.with_suffix(".part")
    write(part)
    part.replace(path)


if __name__ == "__main__":
    raise SystemExit(main())
