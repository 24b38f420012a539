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

from benchmarks.ignn_rivals import Baseline, as_released
from deq_zoo.ignn import IGNNConfig
from deq_zoo.ignn.model import Output
from deq_zoo.ignn.presets import CLIPPED, EXACT, FAR, LONG
from deq_zoo.ignn.set_task import GraphClassTask, TissueTask
from deq_zoo.ignn.task import NodeTask, hardest
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
    began, step, carry = time.perf_counter(), 0, None
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
        over = time.perf_counter() - began > seconds
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
    return Fit(score, epoch, time.perf_counter() - began, failures / max(1, solves))


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
    rows = {name: _in_a_process(name, task, size.speed_steps) for name in ("ours", "release")}
    for name, row in rows.items():
        times = rows["release"]["ms"] / row["ms"]
        yield {"layout": name, "width": size.speed_width, **row, "times_release": times}


def ppi(size: Size, data_dir: str) -> Iterator[dict[str, Any]]:
    """F1 on the tissues of PPI with two gradients."""
    net = IGNNConfig(width=size.ppi_width, kappa=0.98)
    for name, deq in (
        ("phantom gradient", CLIPPED),
        ("implicit", CLIPPED.with_options(ift=True, b_tol=1e-4)),
    ):
        learner = TissueTask(net=net, deq=deq, data_dir=data_dir)
        found = [fit(learner, size.ppi_epochs, seed, Rate(5e-3)) for seed in range(size.ppi_seeds)]
        yield {"gradient": name, "width": size.ppi_width, **summary(found)}


def _in_a_process(layout: str, task: TissueTask, steps: int) -> dict[str, float]:
    """Peak memory belongs to a process, so each layout has one of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_time_steps, (layout, task, steps))


def _time_steps(layout: str, task: TissueTask, steps: int) -> dict[str, float]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = task.build()
    if layout == "release":
        as_released(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    batches = [task.train_batch(k, 0, Shard()) for k in range(steps + 1)]
    before, times, evaluations = _peak_mb(), [], 0
    for batch in batches:
        began = time.perf_counter()
        (part,) = batch
        out: Output = model(part.x, part.graph)
        loss = F.binary_cross_entropy_with_logits(out.logits, part.y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        times.append(1e3 * (time.perf_counter() - began))
        evaluations += sum(stats.nfe for stats in out.stats)
    times = times[1:]  # the first one warms up
    return {
        "ms": median(times),
        "spread_ms": max(times) - min(times),
        "peak_mb": _peak_mb() - before,
        "evaluations": evaluations / len(batches),
        "residual": float(hardest(out.stats)["rel_lowest"].max()),
    }


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
