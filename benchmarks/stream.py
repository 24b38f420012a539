"""How many evaluations, and how much time, does a stream save against fixed batches run to the end?

Four loads: (a) a convolution with one hard sample in 64; (b) an MLP of width 256 whose samples are
equally hard, where a stream can only lose; (c) the test set of mdeq-quick; (d) the scoring of
passages by lm-quick. Both contestants solve the same samples with the same solver and tolerance and
take turns; evaluations are counted, and times are medians of rounds.

`python -m benchmarks.stream` on a quiet machine, a few minutes; the first run trains the two models
of the zoo in `.bench/stream`. `--quick` for a try with untrained models and few samples.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import deq_zoo
from benchmarks.storing import RESULTS, store
from benchmarks.table import render
from deq_zoo.lm.passages import score_passages
from deq_zoo.loading import open_model
from deq_zoo.preset import find_preset
from torchdeq import Anderson, Broyden, FixedPointIter, Solver, StopRule, solve
from torchdeq.stream import Stream

MODELS = Path(".bench") / "stream"
STOP = StopRule(300, 1e-5, "rel")


@dataclass(frozen=True)
class Row:
    """One load with one solver."""

    load: str
    solver: str
    samples: int
    slots: int
    useful: int  # evaluations that the samples need alone
    fixed: int  # evaluations spent
    stream: int
    fixed_ms: float
    stream_ms: float
    ratio: float  # time of fixed batches over that of the stream, median of rounds
    error: float  # the largest difference of answers


@dataclass(frozen=True)
class Load:
    """Samples, and how each contestant solves them; both return answers and evaluations."""

    name: str
    solver: str
    samples: int
    slots: int
    fixed: Callable[[], tuple[Tensor, int]]
    stream: Callable[[], tuple[Tensor, int, int]]  # answers, evaluations spent, useful ones


def synthetic(
    name: str, f: Any, gains: Tensor, shape: tuple[int, ...], slots: int, solver: Solver[Any]
) -> Load:
    """Return samples of f(z, x, gain)."""
    rng = torch.Generator().manual_seed(0)
    n = len(gains)
    x = 0.02 * torch.randn(n, *shape, generator=rng)
    gain, z0 = gains.view(-1, *[1] * len(shape)), torch.zeros_like(x)

    def fixed() -> tuple[Tensor, int]:
        states, spent = [], 0
        for part in torch.arange(n).split(slots):
            rows = slice(int(part[0]), int(part[-1]) + 1)
            found = solve(
                f, z0[rows], solver, STOP, args=(x[rows], gain[rows]), on_failure="ignore"
            )
            states.append(found.z)
            spent += found.stats.nfe * len(part)
        return torch.cat(states), spent

    def stream() -> tuple[Tensor, int, int]:
        engine = Stream(f, slots=slots, solver=solver, stop=STOP)
        found = engine.solve(z0, (x, gain), on_failure="ignore")
        return found.z, engine.counts.evaluations, engine.counts.useful

    return Load(name, type(solver).__name__, n, slots, fixed, stream)


def conv(quick: bool) -> list[Load]:
    """Return (a): every 64th sample is hard."""
    rng = torch.Generator().manual_seed(0)
    kernel, v = torch.randn(16, 16, 3, 3, generator=rng), torch.randn(1, 16, 16, 16, generator=rng)
    for _ in range(30):
        v = F.conv2d(v, kernel, padding=1)
        norm = v.norm()
        v = v / norm
    kernel = kernel / norm

    def f(z: Tensor, x: Tensor, gain: Tensor) -> Tensor:
        return torch.tanh(gain * F.conv2d(z, kernel, padding=1) + x)

    n = 128 if quick else 512
    gains = torch.where(torch.arange(n) % 64 == 17, 0.97, 0.6)
    return [
        synthetic("conv, 1 hard in 64", f, gains, (16, 16, 16), 64, solver)
        for solver in (FixedPointIter(), Anderson())
    ]


def mlp(quick: bool) -> list[Load]:
    """Return (b): all samples are equally hard."""
    W = torch.linalg.qr(torch.randn(256, 256, generator=torch.Generator().manual_seed(0)))[0]

    def f(z: Tensor, x: Tensor, gain: Tensor) -> Tensor:
        return torch.tanh(gain * (z @ W) + x)

    gains = torch.full((512 if quick else 2048,), 0.8)
    return [
        synthetic("MLP 256, equal", f, gains, (256,), 256, solver)
        for solver in (FixedPointIter(), Anderson(), Broyden())
    ]


def trained(name: str, quick: bool) -> tuple[Any, Any]:
    """Return a model of the zoo and its task, trained once."""
    if quick:
        task = find_preset(name).task
        return task.build({}).eval(), task
    folder = MODELS / name
    if not (folder / "report.html").exists():
        deq_zoo.train(name, out=folder, force=True, quiet=True, cpu=True)
    model, preset = open_model(folder)
    return model, preset.task


def mdeq(quick: bool) -> list[Load]:
    """Return (c): pyramids of the test images of mdeq-quick."""
    model, task = trained("mdeq-quick", quick)
    pixels = task.test_set.pixels[: 100 if quick else None]
    with torch.no_grad():
        x = task._normalise(pixels)
        batches = [model.inject(part) for part in x.split(50 if quick else task.eval_batch)]

    rows = counting(model.full_stage)

    def fixed() -> tuple[Tensor, int]:
        before = rows[0]
        solved = [model.solve(u)[0][-1] for u in batches]
        return torch.cat([z[0].flatten(1) for z in solved]), rows[0] - before

    def stream() -> tuple[Tensor, int, int]:
        before = rows[0]
        solved = list(model.solve_stream(batches, len(batches[0])))
        useful = sum(needed(model, s.stats) for s in solved)
        z = torch.cat([s.z[0].flatten(1) for s in solved])
        return z, rows[0] - before, useful

    return [Load("mdeq-quick, test set", task.deq.f_solver, len(x), len(batches[0]), fixed, stream)]


def lm(quick: bool) -> list[Load]:
    """Return (d): passages of the test text of lm-quick."""
    model, task = trained("lm-quick", quick)
    n, length, slots = (24, 17, 8) if quick else (512, task.length + 1, 32)
    ids = torch.randint(256, (n * length,)) if quick else task.test_set[: n * length]
    n = len(ids) // length
    ids = ids[: n * length].view(n, length)

    rows = counting(model.func)

    def fixed() -> tuple[Tensor, int]:
        before = rows[0]
        log_probs, _ = score_passages(model, ids, batch=slots)
        return log_probs, rows[0] - before

    def stream() -> tuple[Tensor, int, int]:
        before = rows[0]
        log_probs, stats = score_passages(model, ids, slots=slots, batch=slots)
        return log_probs, rows[0] - before, needed(model, stats)

    return [Load("lm-quick, passages", task.deq.f_solver, n, slots, fixed, stream)]


def counting(module: torch.nn.Module) -> list[int]:
    """Return a list whose number is that of the samples which a module has evaluated."""
    rows = [0]

    def count(_: Any, inputs: Any) -> None:
        rows[0] += len(inputs[0])

    module.register_forward_pre_hook(count)
    return rows


def needed(model: Any, stats: Any) -> int:
    """Return the evaluations after which samples left: at their tolerance, or at the budget."""
    budget = float(model.deq.eval_f_max_iter)
    return int(torch.where(stats.converged, stats.nstep, budget).sum())


def measure(load: Load, rounds: int) -> Row:
    """Let both contestants solve a load in turns."""
    times: dict[str, list[float]] = {"fixed": [], "stream": []}
    with torch.no_grad():
        answer, spent = load.fixed()
        other, in_stream, useful = load.stream()
        for _ in range(rounds):
            for name, call in (("fixed", load.fixed), ("stream", load.stream)):
                start = perf_counter()
                call()
                times[name].append(perf_counter() - start)
    pairs = zip(times["fixed"], times["stream"], strict=True)
    return Row(
        load.name, load.solver, load.samples, load.slots, useful, spent, in_stream,
        1e3 * median(times["fixed"]), 1e3 * median(times["stream"]),
        median(a / b for a, b in pairs), float((answer - other).abs().max()),
    )  # fmt: skip


def main() -> int:
    """Measure all loads; print a table and keep the numbers."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stream", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="turns (7)")
    parser.add_argument("--quick", action="store_true", help="small loads, untrained models")
    parser.add_argument("--only", choices=("conv", "mlp", "mdeq", "lm"), help="one load")
    options = parser.parse_args()
    torch.set_num_threads(1)
    loads = {"conv": conv, "mlp": mlp, "mdeq": mdeq, "lm": lm}
    rows = [
        measure(load, 2 if options.quick else options.rounds)
        for name, make in loads.items()
        if options.only in (None, name)
        for load in make(options.quick)
    ]
    header = ["load", "solver", "samples", "slots", "useful / fixed", "useful / stream"]
    header += ["fixed ms", "stream ms", "fixed / stream", "difference"]
    print(render(header, [_cells(row) for row in rows], texts=2))
    if not options.quick and options.only is None:
        answers = {"rounds": options.rounds, "rows": [asdict(row) for row in rows]}
        store(RESULTS / "stream.json", answers, seeds=[0])
    return 0


def _cells(row: Row) -> list[str]:
    return [
        row.load, row.solver, str(row.samples), str(row.slots),
        f"{row.useful / row.fixed:.2f}", f"{row.useful / row.stream:.2f}",
        f"{row.fixed_ms:.1f}", f"{row.stream_ms:.1f}", f"{row.ratio:.2f}", f"{row.error:.0e}",
    ]  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
