"""Which gradient teaches a reasoner most, and how few evaluations do its answers need?

`gradients` trains one network on 6x6 Sudokus by five gradients, each for the same processor time:
through the last two steps, through the last round, through a whole supervision step (phantom), by a
reversible iteration, and by the implicit function theorem; `mazes` does so on mazes, and `larger`
asks these runs for larger ones. `halting` compares many restarts of every puzzle with a stream that
halts and starts again only where needed, `depth` goes beyond the depth of training, both with one
trained model; `sides` goes beyond the mazes of training in size and depth, with `reason-mazes`;
`quick` repeats `reason-quick`; `nine` is one run on 9x9 Sudokus with its learning curve. An
interrupted part goes on where it was; a run of `quick` begins again.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.reason_answers import (
    after_training,
    all_restarts,
    at_depth,
    at_side,
    by_stream,
    trained,
)
from benchmarks.reason_training import train
from benchmarks.rows import Job, Row, make_rows
from benchmarks.storing import results_file
from deq_zoo.evaluate import evaluate
from deq_zoo.preset import Preset
from deq_zoo.reason.presets import reason_maze13, reason_sudoku6, reason_sudoku9
from deq_zoo.reason.search import Search
from deq_zoo.reason.task import SolvePuzzles
from deq_zoo.training import train as train_run
from torchdeq import DEQConfig

MODELS = Path(".bench") / "reason"
#: The trained model of a part.
TRAINED = {"halting": "reason-6x6", "depth": "reason-6x6", "sides": "reason-mazes"}

#: How training differentiates, by name. An update is two supervision steps, of which the last one,
#: or a part of it, has a gradient; both have one in the reversible iteration.
GRADIENTS: dict[str, dict[str, Any]] = {
    "one step": {"gradient": "one_step", "f_max_iter": 2},
    "round": {"gradient": "round", "f_max_iter": 2},
    "phantom": {
        "gradient": "deq",
        "backward": "phantom",
        "grad": [1],
        "tau": 1.0,
        "f_max_iter": 1,
    },
    "reversible": {"gradient": "deq", "backward": "reversible", "f_max_iter": 2},
    "implicit": {
        "gradient": "deq",
        "ift": True,
        "f_max_iter": 1,
        "b_solver": "gmres",
        "b_max_iter": 12,
        "b_tol": 1e-2,
    },
}
# Options of a preset that every run keeps; its gradient is none of them.
_EVALUATION = ("eval_f_max_iter", "f_tol", "f_stop_mode")
_STEPS = 2  # supervision steps of an update


@dataclass(frozen=True)
class Size:
    """The size of the benchmark; the names of its files begin with `prefix`."""

    prefix: str = ""
    seconds: float = 900.0
    nine_seconds: float = 4500.0
    seeds: int = 2
    quick_seeds: int = 3
    quick_steps: int = 0  # of `reason-quick`; 0 takes those of the preset
    points: int = 8
    puzzles: int = 2000
    tests: int = 500
    restarts: int = 16
    depth: int = 64
    sides: tuple[int, ...] = (13, 19, 25, 31)
    mazes: int = 100
    width: int = 0  # of the network; 0 takes that of the preset


SMALL = Size(
    prefix="small-", seconds=0.5, nine_seconds=0.5, seeds=1, quick_seeds=1, quick_steps=4,
    points=2, puzzles=6, tests=4, restarts=2, depth=6, sides=(13, 15), mazes=2, width=8,
)  # fmt: skip


def _quiet(preset: Preset) -> Preset:
    """Return a preset without noise, whose evaluations are as deep as training.

    The published recursion draws noise for every step, and a solve has none: without it, runs
    differ in their gradient alone.
    """
    task = preset.task
    assert isinstance(task, SolvePuzzles)
    depth = _STEPS * task.net.max_steps  # that of training
    return replace(preset, task=replace(task, net=replace(task.net, noise=0.0), depth=depth))


def sized(preset: Preset, size: Size) -> Preset:
    """Return a preset with as many puzzles as the benchmark takes."""
    task = preset.task
    assert isinstance(task, SolvePuzzles)
    task = replace(task, puzzles=size.puzzles, val_puzzles=size.tests // 2, test_puzzles=size.tests)
    if size.width:
        heads = 2 if task.net.mixer == "attention" else task.net.heads
        net = replace(task.net, width=size.width, heads=heads, blocks=1, rounds=1, inner=1)
        task = replace(task, net=net, batch=4)
    return replace(preset, task=task)


def with_gradient(preset: Preset, options: dict[str, Any]) -> Preset:
    """Return a preset that differentiates in another way."""
    own = dict(options)
    task = preset.task
    assert isinstance(task, SolvePuzzles)
    deq = {name: getattr(task.deq, name) for name in _EVALUATION} | {
        name: own.pop(name) for name in list(own) if name != "gradient"
    }
    return replace(preset, task=replace(task, **own, deq=DEQConfig(**deq)))


def gradients(size: Size, model: str) -> Iterator[Job]:
    """Yield a run of each gradient on 6x6 Sudokus."""
    yield from _by_gradient("sudoku6", reason_sudoku6(), size)


def mazes(size: Size, model: str) -> Iterator[Job]:
    """Yield a run of each gradient on mazes of 13x13."""
    yield from _by_gradient("maze13", reason_maze13(), size)


def larger(size: Size, model: str) -> Iterator[Job]:
    """Yield what the runs of `mazes` answer on larger ones, at four times the depth of training."""
    for job in mazes(size, model):
        preset, seconds, _, file = job.arguments
        depth = 4 * preset.task.depth
        arguments = (preset, seconds, file, size.mazes, size.sides[-1], depth)
        yield Job(job.key, after_training, arguments)


def _by_gradient(name: str, preset: Preset, size: Size) -> Iterator[Job]:
    """Yield a run of each gradient, with accuracy, residual, memory and time per step."""
    preset = _quiet(sized(preset, size))
    for seed in range(size.seeds):
        for rule, options in GRADIENTS.items():
            run = replace(with_gradient(preset, options), seed=seed)
            key = f"{name}, {rule}, {seed}"
            yield Job(key, train, (run, size.seconds, size.points, file_of(size, key)))


def quick(size: Size, model: str) -> Iterator[Job]:
    """Yield whole runs of `reason-quick`, as `deq-zoo train` makes them."""
    for seed in range(size.quick_seeds):
        yield Job(str(seed), train_quick, (size, seed))


def train_quick(size: Size, seed: int) -> Row:
    """Return the processor time of a run, and the figures of its best weights."""
    began = time.process_time()
    folder = MODELS / f"{size.prefix}quick-{seed}"
    options: dict[str, Any] = {"out": folder, "force": True, "quiet": True, "report": False}
    if size.quick_steps:
        options["steps"] = size.quick_steps
    result = train_run("reason-quick", cpu=True, seed=seed, **options)
    seconds = time.process_time() - began
    task, model = trained(str(folder), size.tests)
    scored = evaluate(task, model, "test", thorough=True)
    return {
        **{name: scored.metrics[name] for name in ("exact", "cells", "residual", "confidence")},
        "spectral_radius": scored.solver.summary().get("spectral_radius"),
        "parameters": sum(p.numel() for p in model.core.parameters()),
        "updates": result.steps,
        "best_update": result.best_step,
        "seconds": seconds,
    }


def nine(size: Size, model: str) -> Iterator[Job]:
    """Yield one run on 9x9 Sudokus, with its learning curve."""
    preset = sized(reason_sudoku9(), size)
    file = file_of(size, "sudoku9")
    yield Job("sudoku9", train, (preset, size.nine_seconds, 3 * size.points, file))


def file_of(size: Size, key: str) -> Path:
    """Return the checkpoint of a run."""
    return MODELS / f"{size.prefix}{key.replace(', ', '-').replace(' ', '_')}.safetensors"


def depth(size: Size, model: str) -> Iterator[Job]:
    """Yield accuracy and residual at multiples of the depth of training."""
    for factor in (1, 2, 4, 16):
        yield Job(f"{factor}x", at_depth, (model, size.tests, factor))


def sides(size: Size, model: str) -> Iterator[Job]:
    """Yield accuracy and residual on larger mazes, at multiples of the depth of training."""
    for side in size.sides:
        for factor in (1, 2, 4, 8):
            yield Job(f"{side}, {factor}x", at_side, (model, size.mazes, side, factor))


def halting(size: Size, model: str) -> Iterator[Job]:
    """Yield accuracy and evaluations of restarts for all puzzles, and of streams."""
    yield Job("all restarts", all_restarts, (model, size.tests, size.restarts, size.depth))
    for halt in ("residual", "head", "both"):
        for tol in (1e-2, 3e-3, 1e-3) if halt != "head" else (1e-2,):
            for choose in ("residual", "vote"):
                search = Search(halt=halt, choose=choose, restarts=size.restarts - 1)
                key = f"stream, {halt}, {tol:g}, {choose}"
                yield Job(key, by_stream, (model, size.tests, search, tol, size.depth))


PARTS: dict[str, Callable[[Size, str], Iterator[Job]]] = {
    "gradients": gradients,
    "mazes": mazes,
    "larger": larger,
    "halting": halting,
    "depth": depth,
    "quick": quick,
    "nine": nine,
    "sides": sides,
}


def seeds_of(part: str, size: Size) -> range:
    """Return the seeds of a part; most have one."""
    several = dict.fromkeys(("gradients", "mazes", "larger"), size.seeds)
    return range((several | {"quick": size.quick_seeds}).get(part, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=tuple(PARTS), help="one of the questions")
    parser.add_argument("--model", help="run or name, for halting, depth and sides")
    parser.add_argument("--small", action="store_true", help="a minute or two, to try it out")
    parser.add_argument("--processes", type=int, default=2, help="runs at a time")
    args = parser.parse_args()
    size = SMALL if args.small else Size()
    file = results_file("reason", args.small)
    for part in [args.only] if args.only else list(PARTS):
        model = args.model or TRAINED.get(part, "")
        make_rows(file, part, PARTS[part](size, model), seeds_of(part, size), args.processes)


if __name__ == "__main__":
    main()
