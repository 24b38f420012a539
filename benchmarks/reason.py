"""Which gradient teaches a reasoner most, and how few evaluations do its answers need?

`gradients` trains one network by five gradients, each for the same processor time: through the last
two steps, through the last round, through a whole supervision step (phantom), by a reversible
iteration, and by the implicit function theorem. `halting` compares many restarts of every puzzle
with a stream that halts and starts again only where needed, `depth` goes beyond the depth of
training, `nine` is one run on 9x9 Sudokus with its learning curve. An interrupted part goes on
where it was.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.reason_training import Row, Training
from benchmarks.storing import RESULTS, read, store_part
from deq_zoo.checkpoint import Checkpoint
from deq_zoo.evaluate import evaluate
from deq_zoo.preset import Preset
from deq_zoo.reason.choice import convergence_scores, selection_metrics
from deq_zoo.reason.loss import IGNORED
from deq_zoo.reason.model import Reasoner
from deq_zoo.reason.presets import reason_maze13, reason_sudoku6, reason_sudoku9
from deq_zoo.reason.search import Search
from deq_zoo.reason.task import SolvePuzzles
from deq_zoo.task import generator
from torchdeq import DEQConfig

FILE = RESULTS / "reason.json"
MODELS = Path(".bench") / "reason"

#: How training differentiates, by name. Each runs two evaluations of f, or one and its gradient.
GRADIENTS: dict[str, dict[str, Any]] = {
    "one step": {"gradient": "one_step"},
    "round": {"gradient": "round"},
    "phantom": {"gradient": "deq", "backward": "phantom", "grad": [1], "tau": 1.0},
    "reversible": {"gradient": "deq", "backward": "reversible", "f_max_iter": 2},
    "implicit": {
        "gradient": "deq",
        "ift": True,
        "b_solver": "gmres",
        "b_max_iter": 12,
        "b_tol": 1e-2,
    },
}


@dataclass(frozen=True)
class Size:
    """The size of the benchmark."""

    seconds: float = 900.0
    nine_seconds: float = 7200.0
    seeds: int = 2
    points: int = 15
    puzzles: int = 2000
    tests: int = 500
    restarts: int = 16
    depth: int = 64
    width: int = 0  # of the network; 0 takes that of the preset


SMALL = Size(
    seconds=0.5, nine_seconds=0.5, seeds=1, points=2, puzzles=6, tests=2, restarts=2, depth=6,
    width=8,
)  # fmt: skip

Rows = Iterator[tuple[str, Callable[[], Row]]]


def tasks(size: Size) -> dict[str, Preset]:
    """Return the presets that the gradients are compared on."""
    presets = {"sudoku6": reason_sudoku6(), "maze13": reason_maze13()}
    return {name: sized(preset, size) for name, preset in presets.items()}


def sized(preset: Preset, size: Size) -> Preset:
    """Return a preset with as many puzzles as the benchmark takes."""
    task = preset.task
    assert isinstance(task, SolvePuzzles)
    task = replace(task, puzzles=size.puzzles, val_puzzles=size.tests // 2, test_puzzles=size.tests)
    if size.width:
        net = replace(task.net, width=size.width, heads=2, blocks=1, rounds=1, inner=1)
        task = replace(task, net=net, batch=4)
    return replace(preset, task=task)


def with_gradient(preset: Preset, options: dict[str, Any]) -> Preset:
    """Return a preset that differentiates in another way."""
    own = dict(options)
    task = preset.task
    assert isinstance(task, SolvePuzzles)
    deq = {name: getattr(task.deq, name) for name in task.deq.given} | {
        name: own.pop(name) for name in list(own) if name != "gradient"
    }
    return replace(preset, task=replace(task, **own, deq=DEQConfig(**deq)))


def gradients(size: Size, data: str) -> Rows:
    """Yield accuracy, residual, memory and time per step of each gradient."""
    for seed in range(size.seeds):
        for name, preset in tasks(size).items():
            for rule, options in GRADIENTS.items():
                run = replace(with_gradient(preset, options), seed=seed)
                key = f"{name}, {rule}, {seed}"
                yield key, lambda k=key, p=run: train(k, p, size.seconds, size.points)  # type: ignore[misc]


def nine(size: Size, data: str) -> Rows:
    """Yield one run on 9x9 Sudokus, with its learning curve."""
    preset = sized(reason_sudoku9(), replace(size, puzzles=size.puzzles // 2))
    yield "sudoku9", lambda: train("sudoku9", preset, size.nine_seconds, 2 * size.points)


def train(key: str, preset: Preset, seconds: float, points: int) -> Row:
    """Train in this process; see `Training`."""
    MODELS.mkdir(parents=True, exist_ok=True)
    return Training(preset, seconds, points, file_of(key)).run()


def file_of(key: str) -> Path:
    """Return the checkpoint of a run."""
    return MODELS / f"{key.replace(', ', '-').replace(' ', '_')}.safetensors"


def trained(size: Size, data: str) -> tuple[SolvePuzzles, Reasoner]:
    """Return a task and a model that `gradients` has trained."""
    task = tasks(size)[data].task
    assert isinstance(task, SolvePuzzles)
    file = file_of(f"{data}, round, 0")
    if not file.exists():
        raise SystemExit(
            f"{file} is missing: run python -m benchmarks.reason --only gradients first"
        )
    model = task.build()
    model.load_state_dict(Checkpoint.load(file).model)
    model.facts = task.facts()
    return task, model.eval()


def depth(size: Size, data: str) -> Rows:
    """Yield accuracy and residual at multiples of the depth of training."""
    for factor in (1, 2, 4, 16):
        yield f"{data}, {factor}x", lambda k=factor: at_depth(size, data, k)  # type: ignore[misc]


def at_depth(size: Size, data: str, factor: int) -> Row:
    """Return the metrics of the recursion at a depth."""
    task, model = trained(size, data)
    task = replace(task, depth=factor * task.net.max_steps)
    metrics = evaluate(task, model, "test", thorough=False).metrics
    return {name: metrics[name] for name in ("exact", "residual", "confidence", "evaluations")}


def halting(size: Size, data: str) -> Rows:
    """Yield accuracy and evaluations of restarts for all puzzles, and of streams."""
    yield f"{data}, all restarts", lambda: all_restarts(size, data)
    for halt in ("residual", "head", "both"):
        for tol in (1e-2, 3e-3, 1e-3) if halt != "head" else (1e-2,):
            for choose in ("residual", "vote"):
                key = f"{data}, stream, {halt}, {tol:g}, {choose}"
                search = Search(halt=halt, choose=choose, restarts=size.restarts - 1)
                yield key, lambda s=search, t=tol: by_stream(size, data, s, t)  # type: ignore[misc]


@torch.no_grad()
def all_restarts(size: Size, data: str) -> Row:
    """Return the accuracy of every choice among restarts, each of the full depth."""
    task, model = trained(size, data)
    puzzles, scores, answers = task.test_set, [], []
    for restart in range(size.restarts):
        parts = []
        for number, rows in enumerate(torch.arange(len(puzzles)).split(task.eval_batch)):
            states = model.start(len(rows), generator("restart", restart, number))
            tokens, ids = puzzles.tokens[rows].long(), puzzles.ids[rows]
            states = model.recurse(tokens, max(1, size.depth - 3), states, ids=ids).state
            last = model.recurse(tokens, 4, states, ids=ids, every=True)  # 3 moves, one overlap
            parts.append(torch.stack(last.predictions)[-4:])
        logits = torch.cat(parts, dim=1)
        scores.append(convergence_scores(logits, 3))
        answers.append(logits[-1].argmax(-1))
    metrics = selection_metrics(
        torch.stack(scores, 1), torch.stack(answers, 1), puzzles.labels.long(), IGNORED, 1
    )
    shown = {name: 100 * metrics[name] for name in ("one", "top1", "vote", "any")}
    return {**shown, "evaluations": float(size.restarts * (max(1, size.depth - 3) + 4))}


def by_stream(size: Size, data: str, search: Search, tol: float) -> Row:
    """Return accuracy and evaluations of a stream."""
    task, model = trained(size, data)
    model.deq.f_tol, model.deq.eval_f_max_iter = tol, size.depth
    task = replace(task, evaluation="stream", search=search)
    found = evaluate(task, model, "test", thorough=False)
    statuses = found.solver.summary()["statuses"]
    return {**{k: found.metrics[k] for k in ("exact", "evaluations")}, "statuses": statuses}


PARTS: dict[str, Callable[[Size, str], Rows]] = {
    "gradients": gradients,
    "halting": halting,
    "depth": depth,
    "nine": nine,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=tuple(PARTS), help="one of the questions")
    parser.add_argument("--data", choices=("sudoku6", "maze13"), default="sudoku6")
    parser.add_argument("--small", action="store_true", help="a minute or two, to try it out")
    parser.add_argument("--processes", type=int, default=2, help="runs at a time")
    args = parser.parse_args()
    torch.set_num_threads(1)
    size = SMALL if args.small else Size()
    for part in [args.only] if args.only else list(PARTS):
        run_part(part, size, args)


def run_part(part: str, size: Size, args: argparse.Namespace) -> None:
    """Compute the missing rows of a part, each in a process of its own, and write them."""
    earlier = read(FILE).get(part, {})
    done = earlier.get("rows", {}) if earlier.get("small") == args.small else {}
    missing = [key for key, _ in PARTS[part](size, args.data) if key not in done]
    # Peak memory belongs to a process, so that each run has its own.
    context = multiprocessing.get_context("spawn")
    with context.Pool(args.processes, maxtasksperchild=1) as pool:
        work = [(part, key, size, args.data) for key in missing]
        for key, row in pool.imap_unordered(make_row, work):
            resumed = bool(done)
            done[key] = row
            shown = "  ".join(f"{k} {_show(v)}" for k, v in row.items() if k != "curve")
            print(f"{part}  {key}  {shown}", flush=True)
            rows = {"small": args.small, "rows": done}
            seeds = range(size.seeds if part == "gradients" else 1)
            store_part(FILE, part, rows, seeds, resumed=resumed)


def make_row(work: tuple[str, str, Size, str]) -> tuple[str, Row]:
    """Return one row of a part."""
    part, key, size, data = work
    torch.set_num_threads(1)
    return key, dict(PARTS[part](size, data))[key]()


def _show(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
