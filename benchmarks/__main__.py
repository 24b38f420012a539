"""Run the benchmarks: three tables on the screen, the numbers and a picture in ``results/``."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from time import perf_counter

import torch

from benchmarks import memory, overhead, to_tolerance
from benchmarks.cases import CASES, LARGE
from benchmarks.contest import OLD, open_contest
from benchmarks.picture import draw

RESULTS = Path(__file__).parent / "results"
QUICK = ("mlp", "pair")  # a sanity run


def main() -> int:
    """Answer the three questions; fails if a contestant did."""
    options = _options()
    cases = [name for name in CASES if name != LARGE and options.only in (None, name)]
    if options.quick:
        cases = [name for name in cases if name in QUICK]
    large = "conv" if options.quick else LARGE
    rounds = options.rounds or (1 if options.quick else 9)
    start = perf_counter()
    with open_contest() as contest:
        print(f"one thread, up to {rounds} rounds, contestants in turns\n", flush=True)
        cost = overhead.run(contest, cases, rounds)
        print(cost, end="\n\n", flush=True)
        speed = to_tolerance.run(contest, cases, rounds)
        print(speed, end="\n\n", flush=True)
        space = memory.run(contest, large)
        print(space, end="\n\n", flush=True)
        failures = contest.failures
    for failure in failures:
        print(f"FAILED: {failure}")
    seconds = perf_counter() - start
    answers = {
        "environment": _environment(),
        "rounds": rounds,
        "seconds": seconds,
        "geometric_mean": {"rounds": cost.mean, "minima": cost.mean_low},
        "overhead": asdict(cost),
        "to_tolerance": asdict(speed),
        "memory": asdict(space),
        "failures": failures,
    }
    name = "partial" if options.quick or options.only else "solvers"
    RESULTS.mkdir(exist_ok=True)
    _replace(RESULTS / f"{name}.json", lambda path: _write(path, answers))
    _replace(RESULTS / f"{name}.png", lambda path: draw(cost, speed, space, path))
    print(f"{seconds:.0f} s; numbers and picture in {RESULTS.name}/{name}.json and .png")
    return 1 if failures else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    choices = [name for name in CASES if name != LARGE]
    parser.add_argument(
        "--only", choices=choices, metavar="CASE", help=f"one of {', '.join(choices)}"
    )
    parser.add_argument("--rounds", type=int, metavar="N", help="turns per contestant (9)")
    parser.add_argument("--quick", action="store_true", help="less than a minute, small cases only")
    return parser.parse_args()


def _environment() -> dict[str, object]:
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": 1,
        "contestant": f"torchdeq {OLD}",
    }


def _write(path: Path, answers: dict[str, object]) -> None:
    path.write_text(json.dumps(answers, indent=1) + "\n")


def _replace(path: Path, write: Callable[[Path], None]) -> None:
    """Write under another name first, so that a killed run leaves the old file whole."""
    part = path.with_suffix(".part")
    write(part)
    part.replace(path)


if __name__ == "__main__":
    raise SystemExit(main())
