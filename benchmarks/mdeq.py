"""How long is a training step of MDEQ, beside the same network on the solver of torchdeq 0.1.0?

Three ways through one CIFAR-10 Tiny, interleaved: ours, 0.1.0's Broyden and phantom gradient in the
same configuration (23 evaluations, full memory, 5 steps), and the floor: 23 bare calls of f and the
phantom part. `python -m benchmarks.mdeq`.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.contest import PUBLISHED, installed
from benchmarks.storing import RESULTS, store
from deq_zoo.mdeq import TINY, MDEQClassifier
from torchdeq import DEQConfig, SolverStat

EVALUATIONS, GRAD, TAU = 23, 5, 0.5


def published(folder: Path) -> ModuleType:
    """torchdeq 0.1.0 under another name, beside ours."""
    root = folder / "torchdeq"
    spec = importlib.util.spec_from_file_location(
        "published_torchdeq", root / "__init__.py", submodule_search_locations=[str(root)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["published_torchdeq"] = module
    spec.loader.exec_module(module)
    return module


class Published(nn.Module):
    """0.1.0's DEQ in the place of ours."""

    def __init__(self, package: ModuleType) -> None:
        super().__init__()
        # It counts steps: the evaluation they start from comes on top.
        self.deq = package.get_deq(
            f_solver="broyden", f_max_iter=EVALUATIONS - 1, f_tol=0.0, grad=GRAD, tau=TAU
        )

    def forward(self, f: Any, z0: list[Tensor], args: tuple[Any, ...]) -> Any:
        return self.deq(lambda *z: f(*z, *args), z0)


class Floor(nn.Module):
    """The calls of f that cannot be saved, and nothing else."""

    def forward(self, f: Any, z0: list[Tensor], args: tuple[Any, ...]) -> Any:
        with torch.no_grad():
            for _ in range(EVALUATIONS):
                z = f(*z0, *args)
        z = z0
        for _ in range(GRAD):
            z = [torch.lerp(a, b, TAU) for a, b in zip(z, f(*z, *args), strict=True)]
        return [z], SolverStat()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ours = DEQConfig(
        f_solver="broyden",
        f_solver_kwargs={"l_thres": None},
        f_max_iter=EVALUATIONS,
        f_tol=0.0,
        grad=[GRAD],
        tau=TAU,
    )
    model = MDEQClassifier(TINY, ours)
    if not installed():
        parser.error("this comparison needs torchdeq 0.1.0")
    ways: dict[str, Any] = {
        "ours": model.deq,
        "0.1.0": Published(published(PUBLISHED)),
        "floor": Floor(),
    }
    x, y = torch.randn(args.batch, 3, 32, 32), torch.randint(10, (args.batch,))
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(args.rounds + 1):
        for name, deq in ways.items():
            model.deq = deq
            seconds[name].append(timed(lambda: train_step(model, x, y)))
    found = {name: median(values[1:]) for name, values in seconds.items()}
    share = (found["ours"] - found["floor"]) / (found["0.1.0"] - found["floor"])
    for name, value in found.items():
        print(f"{name:6} {value:.3f} s a step of {args.batch} images")
    print(f"beyond the floor: {share:.2f} of what 0.1.0 spends")
    results = {"batch": args.batch, "seconds": seconds, "beyond_the_floor": share}
    store(RESULTS / "mdeq.json", results, seeds=[0])


def train_step(model: nn.Module, x: Tensor, y: Tensor) -> None:
    model.zero_grad(set_to_none=True)
    logits = model(x).predictions
    cross_entropy(logits[-1], y).backward()


def timed(run: Callable[[], None]) -> float:
    """Processor time: other work on the machine does not count."""
    began = time.process_time()
    run()
    return time.process_time() - began


if __name__ == "__main__":
    main()
