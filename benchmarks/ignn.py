"""How far does an implicit graph network see, how steadily does it train, how fast is its layout?

Four questions, each with a table: chains by length beside a two-layer GCN; accuracies over seeds
beside GCN and GAT of PyG, with and without clipped spectral norm; a step on a tissue of PPI beside
the layout of the authors' release (uncoalesced coordinates, features first); and F1 on the tissues.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

from benchmarks.ignn_layout import compare_layouts
from benchmarks.ignn_rivals import Baseline
from benchmarks.storing import results_file, store_part
from deq_zoo.evaluate import evaluate
from deq_zoo.ignn import IGNNConfig
from deq_zoo.ignn.presets import CLIPPED, EXACT, FAR, LONG
from deq_zoo.ignn.set_task import GraphClassTask, TissueTask
from deq_zoo.ignn.task import NodeTask
from deq_zoo.record import SolverRecord
from deq_zoo.task import Shard, Split

NAME = "ignn"


@dataclass(frozen=True)
class Size:
    """The size of every part: seeds, epochs, widths, time."""

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

    def seeds_of(self, part: str) -> range:
        """Return the seeds that a part may use; a row may end earlier, at its limit of time."""
        counts = {"chains": self.chain_seeds, "stability": self.seeds, "ppi": self.ppi_seeds}
        return range(counts.get(part, 1))


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
    file = results_file(NAME, args.small)
    for name in [args.only] if args.only else list(PARTS):
        began, rows = time.perf_counter(), []
        for row in PARTS[name](size, args.data_dir):
            rows.append(row)
            print("  ".join(f"{key} {_show(value)}" for key, value in row.items()), flush=True)
        minutes = (time.perf_counter() - began) / 60
        part = {"minutes": round(minutes, 1), "rows": rows}
        store_part(file, name, part, seeds=size.seeds_of(name))


def _show(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def chains(size: Size, data_dir: str) -> Iterator[dict[str, Any]]:
    """Yield the accuracy by length; a GCN of two layers sees two steps."""
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
            fits = [
                fit(contestant, size.chain_epochs, seed, Rate(0.01))
                for seed in range(size.chain_seeds)
            ]
            row = summary(fits)
            del row["unconverged"]  # the whole budget is spent: there is no tolerance to meet
            yield {"length": length, "model": name, **row}


def stability(size: Size, data_dir: str) -> Iterator[dict[str, Any]]:
    """Yield the accuracy over seeds."""
    for name in size.sets:
        for model, contestant in _contestants(name, data_dir).items():
            epochs = size.graph_epochs if name.isupper() else size.node_epochs
            decay = 5e-3 if model.startswith("IGNN") else 5e-4
            rate = Rate(0.01, 0.0 if name.isupper() else decay)
            fits = []
            for seed in range(size.seeds):
                task = contestant.with_seed(seed) if name.isupper() else contestant
                fits.append(fit(task, epochs, seed, rate, size.row_seconds / size.seeds))
            yield {"set": name, "model": model, **summary(fits)}


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
    """A task with another split for every seed."""

    def with_seed(self, seed: int) -> Reseeded:
        return replace(self, split_seed=seed)


@dataclass(frozen=True)
class Rate:
    """Learning rate and weight decay of Adam."""

    lr: float
    weight_decay: float = 0.0


@dataclass(frozen=True)
class Fit:
    """The result of one run.

    Args:
        score: on test data, at the epoch that is best on validation data.
        epochs: of training.
        seconds: of processor time.
        failed: share of solves that did not converge, in the evaluations.
    """

    score: float
    epochs: int
    seconds: float
    failed: float = 0.0


def fit(task: Any, epochs: int, seed: int, rate: Rate, seconds: float = float("inf")) -> Fit:
    """Train; return the test score at the epoch that is best on validation data."""
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
            val, solver = _score(task, model, "val")
            solves += solver.samples
            failures += sum(solver.statuses[s] for s in ("MAX_ITER", "DIVERGED", "NONFINITE"))
            if val > best:
                best, score = val, _score(task, model, "test")[0]
        if over:
            break
    return Fit(score, epoch, time.process_time() - began, failures / max(1, solves))


def _score(task: Any, model: Any, split: Split) -> tuple[float, SolverRecord]:
    """Return accuracy or micro-F1, the first metric of every task, and the solver's record."""
    result = evaluate(task, model, split, thorough=False)
    return next(iter(result.metrics.values())), result.solver


def summary(fits: Sequence[Fit]) -> dict[str, Any]:
    """Return median, best and worst over seeds."""
    scores = [f.score for f in fits]
    return {
        "median": median(scores),
        "best": max(scores),
        "worst": min(scores),
        "epochs": min(f.epochs for f in fits),
        "seconds": sum(f.seconds for f in fits),
        "unconverged": sum(f.failed for f in fits) / len(fits),
    }


def layout(size: Size, data_dir: str) -> Iterator[dict[str, Any]]:
    """Yield time and memory of a training step on a tissue of PPI, by layout."""
    return compare_layouts(size.speed_width, size.speed_steps, data_dir)


def ppi(size: Size, data_dir: str) -> Iterator[dict[str, Any]]:
    """Yield F1 on the tissues of PPI with two gradients."""
    net = IGNNConfig(width=size.ppi_width, kappa=0.98)
    task = TissueTask(net=net, deq=CLIPPED, data_dir=data_dir)
    contestants: dict[str, Any] = {
        "IGNN, phantom gradient": task,
        "IGNN, implicit": replace(task, deq=CLIPPED.with_options(ift=True, b_tol=1e-4)),
        "GCN, 2 layers": Baseline(task, "GCN", width=4 * size.ppi_width, dropout=0.0),
    }
    for name, contestant in contestants.items():
        fits = [
            fit(contestant, size.ppi_epochs, seed, Rate(5e-3)) for seed in range(size.ppi_seeds)
        ]
        yield {"model": name, "width": size.ppi_width, **summary(fits)}


PARTS: dict[str, Callable[[Size, str], Iterator[dict[str, Any]]]] = {
    "chains": chains,
    "stability": stability,
    "layout": layout,
    "ppi": ppi,
}

if __name__ == "__main__":
    main()
