"""Is an equilibrium worth its price? Four language models at equal processor time.

A plain transformer, the original DEQ, the convergent one and the attractor, with about 1 and about
4 million parameters, on the words of WikiText-2. Learning rates are chosen on the last 5 % of the
training file, with 1 million parameters; `valid` is scored once, at the end, with the last weights.
`tune` chooses each design's learning rate, `compare` trains, `curve` measures loss by evaluations
of f, `memory` peaks of training, `decode` tokens per second, `ablate` takes parts of the
attractor's training away, and `quality` compares cheap gradients with the exact one. An interrupted
part goes on where it stopped.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import exp
from statistics import mean, median
from typing import Any

import torch

from benchmarks.lm_ablation import train_part, variants
from benchmarks.lm_contest import contestants, with_rate
from benchmarks.lm_quality import GRADIENTS, measure
from benchmarks.lm_rivals import Recomputing
from benchmarks.lm_training import FOLDER, LanguageTraining, evaluate, train, trained
from benchmarks.rows import Job, Row, make_rows
from benchmarks.storing import read, results_file
from deq_zoo.lm.data import Streams
from deq_zoo.lm.decode import make_decoder
from deq_zoo.lm.reading import steps_curve
from deq_zoo.lm.task import LanguageTask
from deq_zoo.preset import Preset

NAME = "lm_designs"
RATES = (1e-3, 2e-3, 4e-3)
DESIGNS = ("explicit", "original", "convergent", "attractor")
_UPDATES_FOR_PEAK = 12


@dataclass(frozen=True)
class Size:
    """The size of the benchmark; the names of its files begin with `prefix`.

    Decoding writes `tokens` with a cache and `again` by recomputation, where one token takes as
    long as the whole context.
    """

    prefix: str = ""
    seconds: float = 1200.0
    tuning_seconds: float = 300.0
    seeds: int = 2
    millions: tuple[int, ...] = (1, 4)
    segments: int = 24
    steps: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 24, 40, 100)
    context: int = 256
    tokens: int = 48
    again: int = 4
    rounds: int = 5


SMALL = Size(
    prefix="small-", seconds=3.0, tuning_seconds=1.5, seeds=1, millions=(1,), segments=1,
    steps=(1, 8), context=16, tokens=4, again=2, rounds=2,
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=tuple(PARTS), help="one of the parts")
    parser.add_argument("--data-dir", default=".", help="folder with WikiText-2, or one above it")
    parser.add_argument("--processes", type=int, default=2, help="runs at a time")
    parser.add_argument("--small", action="store_true", help="a few minutes, to try it out")
    args = parser.parse_args()
    size = SMALL if args.small else Size()
    file = results_file(NAME, args.small)
    for part in [args.only] if args.only else list(PARTS):
        processes = 1 if part in ("decode", "quality") else args.processes
        jobs = PARTS[part](size, args.data_dir)
        make_rows(file, part, jobs, seeds_of(part, size), processes)


def seeds_of(part: str, size: Size) -> range:
    """Return the seeds of a part; most have one."""
    if part == "curve":
        return range(size.seeds - 1, size.seeds)
    return range(size.seeds if part == "compare" else 1)


def tune(size: Size, data_dir: str) -> Iterator[Job]:
    """Yield a short run of each design with each learning rate, at one million parameters."""
    for name, preset in contestants(data_dir, 1, size.segments).items():
        for rate in RATES:
            changed = replace(preset, optim=with_rate(preset.optim, rate))
            run = f"{size.prefix}tune-{name}-{rate:g}"
            yield Job(f"{name} {rate:g}", train, (run, changed, 0, size.tuning_seconds))


def best_rate(name: str, size: Size) -> float:
    """Return the rate with which a design had the lowest held-out loss in the part `tune`."""
    file = results_file(NAME, size == SMALL)
    rows = read(file).get("tune", {}).get("rows", {})
    losses = {rate: rows[f"{name} {rate:g}"]["held_out_loss"] for rate in RATES
              if f"{name} {rate:g}" in rows}  # fmt: skip
    if len(losses) < len(RATES):
        raise SystemExit(f"{file.name} lacks learning rates: run its benchmark with --only tune")
    best = min(losses, key=lambda rate: losses[rate])
    if best in (min(RATES), max(RATES)):
        print(f"{name}: the best rate, {best:g}, is at the end of the range {RATES}")
    return best


def tuned(data_dir: str, millions: int, size: Size) -> dict[str, Preset]:
    """Return the designs, each with its best learning rate."""
    return {
        name: replace(preset, optim=with_rate(preset.optim, best_rate(name, size)))
        for name, preset in contestants(data_dir, millions, size.segments).items()
    }


def compare(size: Size, data_dir: str) -> Iterator[Job]:
    """Yield a run of each design, size and seed, with its score on `valid`."""
    for millions in size.millions:
        for seed in range(size.seeds):
            for name, preset in tuned(data_dir, millions, size).items():
                run = f"{size.prefix}{name}-{millions}m-{seed}"
                job = (run, preset, seed, size)
                yield Job(f"{name} {millions} {seed}", train_and_score, job)


def train_and_score(run: str, preset: Preset, seed: int, size: Size) -> Row:
    """Train, and score `valid` once."""
    row = train(run, preset, seed, size.seconds)
    task = preset.task
    assert isinstance(task, LanguageTask)
    model = trained(run, task)
    whole = replace(task, eval_limit=size.segments if size == SMALL else 0)
    scored = evaluate(whole, model, "test")
    return row | {
        "rate": preset.optim.lr,
        "loss": scored["loss"],
        "perplexity": exp(scored["loss"]),
        "valid_residual": scored["residual"],
        "valid_evaluations": scored["evaluations"],
    }


def curve(size: Size, data_dir: str) -> Iterator[Job]:
    """Yield held-out loss and residual of the largest equilibria by evaluations of f.

    They are those of the last runs of `compare`; a model whose file is missing is trained again.
    """
    millions, seed = size.millions[-1], size.seeds - 1
    presets = tuned(data_dir, millions, size)
    for name in DESIGNS[1:]:
        job = (f"{size.prefix}{name}-{millions}m-{seed}", presets[name], seed, size)
        yield Job(f"{name} {millions} {seed}", measure_curve, job)


def measure_curve(run: str, preset: Preset, seed: int, size: Size) -> Row:
    """Return loss and residual of one model by evaluations of f."""
    train(run, preset, seed, size.seconds)  # nothing to do if its file is complete
    return curve_of(run, preset, size)


@torch.no_grad()
def curve_of(run: str, preset: Preset, size: Size) -> Row:
    """Return loss and residual of a trained model by evaluations of f."""
    task = preset.task
    assert isinstance(task, LanguageTask)
    model = trained(run, task)
    model.deq.f_tol = 0.0  # exactly so many evaluations
    data = Streams.of(task.val_set, task.eval_batch, task.length)
    found = steps_curve(model, data, task.memory, size.steps, min(8, size.segments))
    return {"steps": found.steps, "loss": found.loss, "residual": found.residual}


def memory(size: Size, data_dir: str) -> Iterator[Job]:
    """Yield the peak memory of updates at the end of training, where an attractor solves."""
    for millions in size.millions:
        for name, preset in contestants(data_dir, millions, size.segments).items():
            yield Job(f"{name} {millions}", measure_memory, (preset,))


def measure_memory(preset: Preset) -> Row:
    """Return the peak beyond that of the process with model and data."""
    training = LanguageTraining(preset, 0, 1.0, FOLDER / "none.safetensors")
    return {"peak_mb": training.peak_of(_UPDATES_FOR_PEAK)}


def decode(size: Size, data_dir: str) -> Iterator[Job]:
    """Yield tokens per second after a context, with a cache and by recomputation.

    Batches of 16 texts are measured at the smaller size.
    """
    for millions in size.millions:
        presets = contestants(data_dir, millions, size.segments)
        runs = {name: (f"{size.prefix}{name}-{millions}m-0", presets[name]) for name in DESIGNS}
        for batch in (1, 16) if millions == 1 else (1,):
            yield Job(f"{millions} batch {batch}", measure_speed, (runs, batch, size))


@torch.no_grad()
def measure_speed(runs: dict[str, tuple[str, Preset]], batch: int, size: Size) -> Row:
    """Return medians over rounds in which all designs take turns."""
    total = size.context + size.tokens
    turns: dict[tuple[str, str], Callable[[], Any]] = {}
    for name, (run, preset) in runs.items():
        task = preset.task
        assert isinstance(task, LanguageTask)
        model = trained(run, task)
        turns[name, "cached"] = partial(make_decoder, model, total, task.length)
        turns[name, "recomputed"] = partial(Recomputing, model)
        text = task.val_set[: batch * total].view(batch, total)  # the same for all designs
    tokens = {"cached": size.tokens, "recomputed": size.again}
    seconds: dict[tuple[str, str], list[float]] = {turn: [] for turn in turns}
    counts: dict[str, list[int]] = {name: [] for name in runs}
    for _ in range(size.rounds):
        for (name, way), make in turns.items():
            decoder = make()
            decoder.feed(text[:, : size.context])
            began = time.process_time()
            for token in text[:, size.context :].split(1, dim=1)[: tokens[way]]:
                decoder.feed(token)
                if way == "cached":
                    counts[name].append(decoder.stats.nfe)
            seconds[name, way].append(time.process_time() - began)
    speed = {
        (name, way): batch * tokens[way] / median(times) for (name, way), times in seconds.items()
    }
    return {
        name: {
            "cached": speed[name, "cached"],
            "recomputed": speed[name, "recomputed"],
            "evaluations": mean(counts[name]),
            "context": size.context,
        }
        for name in runs
    }


def ablate(size: Size, data_dir: str) -> Iterator[Job]:
    """Yield short runs of the attractor without a part of its training each, or with another."""
    presets = tuned(data_dir, 1, size)
    for name, changed in variants(presets["attractor"], presets["explicit"]).items():
        run = f"{size.prefix}ablate-{name.replace(' ', '-').replace(',', '')}"
        yield Job(name, train_part, (run, changed, size.tuning_seconds))


def quality(size: Size, data_dir: str) -> Iterator[Job]:
    """Yield errors and times of cheap gradients of the trained attractor of one million."""
    task = contestants(data_dir, 1, size.segments)["attractor"].task
    for name in GRADIENTS:
        yield Job(name, measure, (f"{size.prefix}attractor-1m-0", task, name))


PARTS: dict[str, Callable[[Size, str], Iterator[Job]]] = {
    "tune": tune,
    "compare": compare,
    "curve": curve,
    "memory": memory,
    "decode": decode,
    "ablate": ablate,
    "quality": quality,
}

if __name__ == "__main__":
    main()
