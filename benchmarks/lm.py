"""Which transformer learns most in six minutes, does it converge, and how fast does it write?

Five models of equal size on the words of WikiText-2: a Transformer-XL (stored as `explicit`), the
original DEQ with and without a regularised Jacobian, the redesigned one and the convergent one.
`compare` trains each for the same processor time, `nfe` measures loss and residual by evaluations
of f, and `decode` counts tokens per second. An interrupted part continues with its next row.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import cos, exp, pi
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.lm_rivals import Explicit, Recomputing
from benchmarks.peak import forget_peak, growth_mb
from benchmarks.storing import read, results_file, store_part
from deq_zoo.lm.data import Streams
from deq_zoo.lm.decode import Chunked, Incremental
from deq_zoo.lm.model import DEQTransformer
from deq_zoo.lm.presets import REGULARISED, lm_wt2_final, lm_wt2_ours, lm_wt2_seq
from deq_zoo.lm.reading import steps_curve
from deq_zoo.lm.task import LanguageTask
from deq_zoo.preset import Preset
from deq_zoo.task import WHOLE

NAME = "lm"
MODELS = Path(".bench") / "lm"
Row = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """The size of the benchmark."""

    seconds: float = 360.0
    seeds: int = 2
    eval_segments: int = 60
    steps: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16, 24, 40, 100)
    curve_segments: int = 8
    context: int = 256
    tokens: int = 32
    rounds: int = 5


SMALL = Size(
    seconds=2.0, seeds=1, eval_segments=1, steps=(2, 12), curve_segments=1, context=16, tokens=4,
    rounds=2,
)  # fmt: skip


@dataclass(frozen=True)
class ExplicitTask(LanguageTask):
    """The task of the Transformer-XL, on the same text."""

    def build(self, facts: Mapping[str, Any] | None = None) -> Explicit:
        return Explicit(self.net, self.deq)


def presets(data_dir: str, size: Size) -> dict[str, Preset]:
    """Return the presets of all models, by name."""
    final, seq = lm_wt2_final(), lm_wt2_seq()
    explicit = ExplicitTask(**vars(final.task))
    by_name = {
        "explicit": replace(final, task=explicit),
        "original": seq,
        "original, JR": seq.with_deq(**{n: getattr(REGULARISED, n) for n in REGULARISED.given}),
        "redesigned": final,
        "convergent": lm_wt2_ours(),
    }
    folder = Path(data_dir)
    folder = folder if (folder / "train.txt").exists() else folder / "wikitext2"
    place = {"data_dir": str(folder), "eval_limit": size.eval_segments}
    return {
        name: replace(preset, task=replace(preset.task, **place))  # type: ignore[type-var]
        for name, preset in by_name.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=tuple(PARTS), help="one of the questions")
    parser.add_argument("--data-dir", default=".", help="folder with WikiText-2, or one above it")
    parser.add_argument("--small", action="store_true", help="a minute or two, to try it out")
    args = parser.parse_args()
    torch.set_num_threads(1)
    size, file = SMALL if args.small else Size(), results_file(NAME, args.small)
    for part in [args.only] if args.only else list(PARTS):
        done = read(file).get(part, {}).get("rows", {})
        for key, make in PARTS[part](size, args.data_dir):
            if key in done:
                continue
            resumed = bool(done)
            done[key] = make()
            row = "  ".join(f"{name} {_show(value)}" for name, value in done[key].items())
            print(f"{part}  {key}  {row}", flush=True)
            store_part(file, part, {"rows": done}, seeds_of(part, size), resumed=resumed)


def seeds_of(part: str, size: Size) -> range:
    """Return the seeds of a part: `decode` takes the models of the first."""
    return range(1 if part == "decode" else size.seeds)


def _show(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


Rows = Iterator[tuple[str, Callable[[], Row]]]


def compare(size: Size, data_dir: str) -> Rows:
    """Yield the perplexity of each model after the same processor time."""
    for seed in range(size.seeds):
        for name, preset in presets(data_dir, size).items():
            yield f"{name} {seed}", lambda n=name, p=preset, s=seed: _alone(n, p, s, size)  # type: ignore[misc]


def _alone(name: str, preset: Preset, seed: int, size: Size) -> Row:
    """Train in a process of its own, since peak memory belongs to a process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(train, (name, preset, seed, size))


def train(name: str, preset: Preset, seed: int, size: Size) -> Row:
    """Train for some time, save the weights and evaluate on validation data."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    task = preset.task
    assert isinstance(task, LanguageTask)
    model, carry = task.build(), None
    optimizer = preset.optim.make(model.parameters())
    task.begin(model)  # reads the data
    before, began, steps = forget_peak(), time.process_time(), 0
    times = []
    while (spent := time.process_time() - began) < size.seconds:
        rate = min(1.0, (steps + 1) / 50) * 0.5 * (1 + cos(pi * spent / size.seconds))
        for group in optimizer.param_groups:
            group["lr"] = preset.optim.lr * rate
        loss = task.loss(model, task.train_batch(steps, seed, WHOLE), carry)
        optimizer.zero_grad()
        loss.value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), preset.clip)
        optimizer.step()
        carry, steps = loss.carry, steps + 1
        times.append(time.process_time() - began - spent)
    peak = growth_mb(before)
    MODELS.mkdir(parents=True, exist_ok=True)
    save_file(model.state_dict(), _file(name, seed, size))
    with torch.no_grad():
        result = task.evaluate(model.eval(), "val", thorough=name != "explicit")
    solver = result.solver.summary()
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "perplexity": exp(result.metrics["loss"]),
        "loss": result.metrics["loss"],
        "residual": None if name == "explicit" else solver["residual"],
        "nfe": solver["nfe"],
        "spectral_radius": solver.get("spectral_radius"),
        "ms_per_step": 1e3 * median(times),
        "updates": steps,
        "peak_mb": peak,
    }


def nfe(size: Size, data_dir: str) -> Rows:
    """Yield loss and residual of the trained models by evaluations of f."""
    for name, preset in presets(data_dir, size).items():
        if name != "explicit":
            for seed in range(size.seeds):
                yield f"{name} {seed}", lambda n=name, p=preset, s=seed: curve(n, p, s, size)  # type: ignore[misc]


@torch.no_grad()
def curve(name: str, preset: Preset, seed: int, size: Size) -> Row:
    """Return the curve of one model."""
    task = preset.task
    assert isinstance(task, LanguageTask)
    model = trained(name, task, seed, size)
    model.deq.f_tol = 0.0  # exactly so many evaluations
    data = Streams.of(task.val_set, task.eval_batch, task.length)
    return steps_curve(model, data, task.memory, size.steps, size.curve_segments)._asdict()


def decode(size: Size, data_dir: str) -> Rows:
    """Yield tokens per second after a context, with every decoder of a design."""
    for name in ("original", "redesigned", "convergent"):
        preset = presets(data_dir, size)[name]
        yield name, lambda n=name, p=preset: speeds(n, p, size)  # type: ignore[misc]


def speeds(name: str, preset: Preset, size: Size) -> Row:
    """Return the median over interleaved rounds."""
    task = preset.task
    assert isinstance(task, LanguageTask)
    model = trained(name, task, 0, size)
    span = size.context + size.tokens
    ways: dict[str, Callable[[], Any]] = {"recomputing": lambda: Recomputing(model)}
    if name == "redesigned":
        ways["chunked"] = lambda: Chunked(model, span, task.length)
    else:
        ways["incremental"] = lambda: Incremental(model, span)
        ways["incremental, cold"] = lambda: Incremental(model, span, warm=False)
    text = task.val_set[: size.context + size.tokens][None]
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    evaluations: dict[str, float] = {}
    for _ in range(size.rounds):
        for way, make in ways.items():
            decoder = make()
            decoder.feed(text[:, : size.context])
            began, spent = time.process_time(), []
            for k in range(size.context, size.context + size.tokens):
                decoder.feed(text[:, k : k + 1])
                spent.append(decoder.stats.nfe if hasattr(decoder, "stats") else 0)
            seconds[way].append(time.process_time() - began)
            evaluations[way] = sum(spent) / len(spent)
    row: Row = {"context": size.context}
    for way, values in seconds.items():
        row[f"tokens_per_s {way}"] = size.tokens / median(values)
        if evaluations[way]:
            row[f"evaluations {way}"] = evaluations[way]
    return row


def trained(name: str, task: LanguageTask, seed: int, size: Size) -> DEQTransformer:
    """Return a model that `compare` has trained."""
    file = _file(name, seed, size)
    if not file.exists():
        raise SystemExit(f"{file} is missing: run python -m benchmarks.lm --only compare first")
    model = task.build()
    assert isinstance(model, DEQTransformer), "the designs of this comparison have one class"
    model.load_state_dict(load_file(file))
    return model.eval()


def _file(name: str, seed: int, size: Size) -> Path:
    """Return the file for the weights of a model; a trial run has files of its own."""
    return MODELS / f"{name.replace(', ', '-')}-{size.seconds:g}s-{seed}.safetensors"


PARTS: dict[str, Callable[[Size, str], Rows]] = {"compare": compare, "nfe": nfe, "decode": decode}

if __name__ == "__main__":
    main()
