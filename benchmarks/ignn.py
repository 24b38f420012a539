"""How far does an implicit graph network see, how steadily does it train, how fast is its layout?

Four questions, each with a table: chains by length beside a two-layer GCN; accuracies over seeds
beside GCN and GAT of PyG, with and without clipped spectral norm; a step on a tissue of PPI beside
the layout of the authors' release (uncoalesced coordinates, features first); and F1 on the tissues.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.contest import PUBLISHED
from benchmarks.ignn_rivals import Baseline, as_released, on_published
from deq_zoo.ignn import IGNNConfig
from deq_zoo.ignn.model import Output
from deq_zoo.ignn.presets import CLIPPED, EXACT, FAR, LONG
from deq_zoo.ignn.set_task import GraphClassTask, TissueTask
from deq_zoo.ignn.task import NodeTask
from deq_zoo.task import Evaluation, Shard

RESULTS = Path(__file__).parent / "results" / "ignn.json"
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Size:
    """How much of everything."""

    seeds: int = 6
    lengths: tuple[int, ...] = (10, 25, 50, 100)
    chain_seeds: int = 3
    chain_epochs: int = 100
    graph_epochs: int = 50
    node_epochs: int = 100
    sets: tuple[str, ...] = ("MUTAG", "PROTEINS", "cora", "pubmed")
    speed_width: int = 256
    speed_steps: int = 5
    ppi_width: int = 32
    ppi_epochs: int = 20
    ppi_seeds: int = 3
    row_seconds: float = 180.0  # for all seeds of one model on one set


SMALL = Size(
    seeds=2,
    lengths=(10, 100),
    chain_seeds=1,
    chain_epochs=30,
    graph_epochs=5,
    node_epochs=20,
    speed_width=32,
    speed_steps=2,
    ppi_width=8,
    ppi_epochs=1,
    ppi_seeds=1,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=tuple(PARTS), help="one of the questions")
    parser.add_argument("--data-dir", default=".", help="folder with the sets, at any depth")
    parser.add_argument("--small", action="store_true", help="minutes, to try it out")
    parser.add_argument("--row-seconds", type=float, default=180.0, help="limit of a table's row")
    args = parser.parse_args()
    torch.set_num_threads(1)
    size = replace(SMALL if args.small else Size(), row_seconds=args.row_seconds)
    for name in [args.only] if args.only else list(PARTS):
        began, rows = time.perf_counter(), []
        for row in PARTS[name](size, args.data_dir):
            rows.append(row)
            print("  ".join(f"{key} {_show(value)}" for key, value in row.items()), flush=True)
        minutes = (time.perf_counter() - began) / 60
        held = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        held[name] = {"small": args.small, "minutes": round(minutes, 1), "rows": rows}
        RESULTS.write_text(json.dumps(held, indent=1) + "\n")


def _show(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def chains(size: Size, data_dir: str) -> Iterator[dict[str, Any]]:
    """Accuracy by length; a GCN of two layers sees two steps."""
    for length in size.lengths:
        steps = max(60, 3 * length)
        far = FAR.with_options(f_max_iter=steps, b_max_iter=steps)
        task = NodeTask(net=LONG, deq=far, length=length)
        contestants: dict[str, Any] = {
            "IGNN": task,
            "IGNN, published start of W": replace(task, net=replace(LONG, init="uniform")),
            "GCN, 2 layers": Baseline(task, "GCN", width=16, dropout=0.0),
        }
        for name, contestant in contestants.items():
            found = [
                fit(contestant, size.chain_epochs, seed, Rate(0.01))
                for seed in range(size.chain_seeds)
            ]
            told = summary(found)
            del told["unconverged"]  # the whole budget is spent: there is no tolerance to meet
            yield {"length": length, "model": name, **told}


def stability(size: Size, data_dir: str) -> Iterator[dict[str, Any]]:
    """Accuracy over seeds."""
    for name in size.sets:
        for model, contestant in _contestants(name, data_dir).items():
            epochs = size.graph_epochs if name.isupper() else size.node_epochs
            decay = 5e-3 if model.startswith("IGNN") else 5e-4
            rate = Rate(0.01, 0.0 if name.isupper() else decay)
            found = []
            for seed in range(size.seeds):
                task = contestant.with_seed(seed) if name.isupper() else contestant
                found.append(fit(task, epochs, seed, rate, size.row_seconds / size.seeds))
            yield {"set": name, "model": model, **summary(found)}


def _contestants(name: str, data_dir: str) -> dict[str, Any]:
    task: Any
    if name.isupper():
        plain = EXACT.with_options(f_tol=1e-3, b_tol=1e-3)
        task = Reseeded(data=name, data_dir=data_dir, net=IGNNConfig(width=64), deq=plain)
    else:
        net = IGNNConfig(width=64, kappa=0.9, start="zeros", init="identity")
        task = NodeTask(data=name, data_dir=data_dir, net=net, deq=EXACT, warm=True)  # type: ignore[arg-type]
    clipped = task.deq.with_options(norm_type="spectral_norm", norm_clip=True)
    alone = replace(task.net, kappa=None)
    return {
        "GCN": Baseline(task, "GCN", width=64),
        "GAT": Baseline(task, "GAT", width=64),
        "IGNN, projection": task,
        "IGNN, projection and clipped spectral norm": replace(task, deq=clipped),
        "IGNN, clipped spectral norm": replace(
            task, net=alone, deq=clipped.with_options(on_failure="ignore")
        ),
    }


@dataclass(frozen=True)
class Reseeded(GraphClassTask):
    """A new split for every seed."""

    def with_seed(self, seed: int) -> Reseeded:
        return replace(self, split_seed=seed)


@dataclass(frozen=True)
class Rate:
    """Adam's."""

    lr: float
    weight_decay: float = 0.0


@dataclass(frozen=True)
class Fit:
    """How one run ended: what was chosen by validation, and how long it took."""

    score: float
    epochs: int
    seconds: float
    failed: float = 0.0  # share of solves that did not converge, in the evaluations


def fit(task: Any, epochs: int, seed: int, rate: Rate, seconds: float = float("inf")) -> Fit:
    """Train, choose the epoch by validation, and say what the test split thinks of it."""
    torch.manual_seed(seed)
    model = task.build()
    optimizer = torch.optim.Adam(model.parameters(), lr=rate.lr, weight_decay=rate.weight_decay)
    began, step, carry = time.process_time(), 0, None  # a busy machine is no excuse
    best, score, solves, failures, epoch = -1.0, 0.0, 0, 0, 0
    for epoch in range(1, epochs + 1):
        model.train()
        for _ in range(task.steps_per_epoch):
            loss = task.loss(model, task.train_batch(step, seed, Shard()), carry)
            carry = loss.carry and [z.detach() for z in loss.carry]
            optimizer.zero_grad()
            loss.value.backward()
            optimizer.step()
            task.after_step(model)
            step += 1
        over = time.process_time() - began > seconds
        if epoch % max(1, epochs // 20) == 0 or epoch == epochs or over:
            with torch.no_grad():
                found = task.evaluate(model.eval(), CPU, False)
            chosen = _first(found, "val")
            if chosen > best:
                best, score = chosen, _first(found, "test")
            if found.solver is not None:
                solves += found.solver.samples
                failures += sum(
                    found.solver.statuses[s] for s in ("MAX_ITER", "DIVERGED", "NONFINITE")
                )
        if over:
            break
    return Fit(score, epoch, time.process_time() - began, failures / max(1, solves))


def _first(found: Evaluation, split: str) -> float:
    return next(value for name, value in found.metrics.items() if name.startswith(split))


def summary(found: Sequence[Fit]) -> dict[str, Any]:
    """Median, best and worst over seeds."""
    scores = [f.score for f in found]
    return {
        "median": median(scores),
        "best": max(scores),
        "worst": min(scores),
        "epochs": min(f.epochs for f in found),
        "seconds": sum(f.seconds for f in found),
        "unconverged": sum(f.failed for f in found) / len(found),
    }


def layout(size: Size, data_dir: str) -> Iterator[dict[str, Any]]:
    """Time and memory of a step on a tissue of PPI, in our layout and in the release's."""
    task = TissueTask(
        net=IGNNConfig(width=size.speed_width, kappa=0.98), deq=CLIPPED, data_dir=data_dir
    )
    steps = _in_a_process(_time_steps, task, size.speed_steps)
    for name, times in steps.items():
        ratios = [theirs / ours for ours, theirs in zip(steps["ours"], times, strict=True)]
        peak = _in_a_process(_peak, task, name, size.speed_steps)
        row = {"layout": name, "width": size.speed_width, "ms": median(times), "peak_mb": peak}
        yield {**row, "times_ours": median(ratios)}


def ppi(size: Size, data_dir: str) -> Iterator[dict[str, Any]]:
    """F1 on the tissues of PPI with two gradients."""
    net = IGNNConfig(width=size.ppi_width, kappa=0.98)
    task = TissueTask(net=net, deq=CLIPPED, data_dir=data_dir)
    contestants: dict[str, Any] = {
        "IGNN, phantom gradient": task,
        "IGNN, implicit": replace(task, deq=CLIPPED.with_options(ift=True, b_tol=1e-4)),
        "GCN, 2 layers": Baseline(task, "GCN", width=4 * size.ppi_width, dropout=0.0),
    }
    for name, contestant in contestants.items():
        found = [
            fit(contestant, size.ppi_epochs, seed, Rate(5e-3)) for seed in range(size.ppi_seeds)
        ]
        yield {"model": name, "width": size.ppi_width, **summary(found)}


def _in_a_process(function: Callable[..., Any], *args: Any) -> Any:
    """Peak memory belongs to a process, so each measurement has one of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, args)


def _time_steps(task: TissueTask, steps: int) -> dict[str, list[float]]:
    """Milliseconds of the same steps, the layouts taking turns."""
    runs = {name: Stepper(task, name) for name in LAYOUTS}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for k in range(steps + 1):
        for name, run in runs.items():
            began = time.process_time()
            run.step(k)
            times[name].append(1e3 * (time.process_time() - began))
    return {name: found[1:] for name, found in times.items()}  # the first one warms up


def _peak(task: TissueTask, layout: str, steps: int) -> float:
    """Megabytes above those before the first step."""
    run = Stepper(task, layout)
    before = _peak_mb()
    for k in range(steps + 1):
        run.step(k)
    return _peak_mb() - before


class Stepper:
    """Training steps in one of the two layouts."""

    def __init__(self, task: TissueTask, layout: str) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.task, self.model = task, task.build()
        if layout != "ours":
            as_released(self.model)
        if layout == WHOLE_RELEASE:
            on_published(self.model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=5e-3)
        self.batches = [task.train_batch(k, 0, Shard()) for k in range(SIX)]

    def step(self, k: int) -> None:
        (part,) = self.batches[k % SIX]
        out: Output = self.model(part.x, part.graph)
        loss = F.binary_cross_entropy_with_logits(out.logits, part.y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


WHOLE_RELEASE = "the release's on torchdeq 0.1.0"
LAYOUTS = ("ours", "the release's", *([WHOLE_RELEASE] if PUBLISHED.exists() else []))
SIX = 6  # tissues, the first one to warm up


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


PARTS: dict[str, Callable[[Size, str], Iterator[dict[str, Any]]]] = {
    "chains": chains,
    "stability": stability,
    "layout": layout,
    "ppi": ppi,
}

if __name__ == "__main__":
    main()
