"""What does a training step on a tissue of PPI cost, in our layout and in the release's?"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.contest import PUBLISHED
from benchmarks.ignn_rivals import as_released, on_published
from benchmarks.peak import forget_peak, growth_mb
from deq_zoo.ignn import IGNNConfig
from deq_zoo.ignn.presets import CLIPPED
from deq_zoo.ignn.set_task import TissueTask
from deq_zoo.task import Shard


def compare_layouts(width: int, count: int, data_dir: str) -> Iterator[dict[str, Any]]:
    """Yield time and memory of a step on a tissue of PPI, in our layout and in the release's."""
    task = TissueTask(net=IGNNConfig(width=width, kappa=0.98), deq=CLIPPED, data_dir=data_dir)
    steps = _in_a_process(_time_steps, task, count)
    for name, times in steps.items():
        ratios = [theirs / ours for ours, theirs in zip(steps["ours"], times, strict=True)]
        peak = _in_a_process(_peak, task, name, count)
        row = {"layout": name, "width": width, "ms": median(times), "peak_mb": peak}
        yield {**row, "times_ours": median(ratios)}


def _in_a_process(function: Callable[..., Any], *args: Any) -> Any:
    """Return the result of a function in a new process, since peak memory belongs to a process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, args)


def _time_steps(task: TissueTask, steps: int) -> dict[str, list[float]]:
    """Return the milliseconds of the same steps, the layouts taking turns."""
    runs = {name: Stepper(task, name) for name in LAYOUTS}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for k in range(steps + 1):
        for name, run in runs.items():
            began = time.process_time()
            run.step(k)
            times[name].append(1e3 * (time.process_time() - began))
    return {name: rest for name, (_, *rest) in times.items()}  # the first one warms up


def _peak(task: TissueTask, layout: str, steps: int) -> float:
    """Return the megabytes at the peak above those before the first step."""
    run = Stepper(task, layout)
    before = forget_peak()
    for k in range(steps + 1):
        run.step(k)
    return growth_mb(before)


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
        out = self.model(part.x, part.graph)
        loss = F.binary_cross_entropy_with_logits(out.prediction, part.y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


WHOLE_RELEASE = "the release's on torchdeq 0.1.0"
LAYOUTS = ("ours", "the release's", *([WHOLE_RELEASE] if PUBLISHED.exists() else []))
SIX = 6  # tissues, the first one to warm up
