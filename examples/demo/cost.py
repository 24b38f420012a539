"""What a training step costs as an equilibrium, and with the same network unrolled."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.gauge import held_bytes
from benchmarks.peak import forget_peak, resident_peak
from deq_zoo.preset import Preset, find_preset
from deq_zoo.task import WHOLE

STEPS = 20  # timed of each way to train
WAYS = ("equilibrium", "unrolled")


class Cost(NamedTuple):
    """A training step: median seconds, bytes that the graph keeps, bytes more at the peak."""

    seconds: float
    graph: int
    peak: int


def compare(name: str) -> dict[str, Cost]:
    """Measure every way to train a preset, each in a new process: the peak belongs to a process."""
    return {way: _measured_apart(name, way) for way in WAYS}


def _measured_apart(name: str, way: str) -> Cost:
    process = subprocess.run(
        [sys.executable, "-m", "examples.demo.cost", name, way],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return Cost(*json.loads(process.stdout))


def measure(name: str, way: str) -> Cost:
    """Return the cost of a training step, over a few of them."""
    preset = find_preset(name)
    if way == "unrolled":  # as many steps as the solver evaluates, all of them in the graph
        steps = preset.task.deq.f_max_iter
        preset = preset.with_deq(ift=False, f_max_iter=0, grad=[steps])
    torch.manual_seed(0)
    model = preset.task.build()
    optimizer = preset.optim.make(model.parameters())
    kept = held_bytes(lambda: loss_at(preset, model, 0), list(model.parameters()))
    seconds = []
    before = forget_peak()
    for step in range(STEPS + 1):
        began = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss_at(preset, model, step).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - began)
    return Cost(median(seconds[1:]), kept, resident_peak() - before)


def loss_at(preset: Preset, model: nn.Module, step: int) -> Tensor:
    """Return the loss of a training step, with its graph."""
    return preset.task.loss(model, preset.task.train_batch(step, preset.seed, WHOLE), None).value


if __name__ == "__main__":
    print(json.dumps(measure(*sys.argv[1:])))
