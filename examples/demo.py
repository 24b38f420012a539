"""Train a small MDEQ on real digits, then weigh it against the same network unrolled.

``make demo``: about a minute of training with live progress; leaves ``demo/report.html``.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from deq_zoo.errors import ZooError
from deq_zoo.preset import Preset, find_preset
from deq_zoo.report import write_report
from deq_zoo.run import Run
from deq_zoo.task import Shard
from deq_zoo.train import train

NAME, OUT = "mdeq-quick", Path("demo")
STEPS = 20  # timed of each way to train
WAYS = ("equilibrium", "unrolled")


def main() -> None:
    console = Console()
    preset = find_preset(NAME)
    console.print(f"[bold]{NAME}[/bold]: an equilibrium network learns 4,000 handwritten digits")
    run = Run.create(OUT, NAME, preset, force=True)
    result = train(run, preset, cpu=True)
    if result.interrupted:
        return
    write_report(run)
    solver = list(run.lines("eval"))[-1]["solver"]
    console.print(
        f"\ntest accuracy [bold]{result.metrics['accuracy']:.1f} %[/bold] on 1,000 others, after "
        f"{result.seconds:.0f} s; {solver['nfe']:.1f} evaluations of f per solve, relative "
        f"residual {solver['residual']:.1e}\n"
    )
    console.print(compare([measured_apart(way) for way in WAYS]))
    console.print(f"\nlook at [bold]{run.report}[/bold]")


def compare(found: list[dict[str, float]]) -> Table:
    """One row for each way to train."""
    table = Table(
        "training", "s a step", "MB held by the graph", "MB more at the peak", title_justify="left"
    )
    for way, numbers in zip(WAYS, found, strict=True):
        table.add_row(
            way,
            f"{numbers['seconds']:.3f}",
            f"{numbers['graph'] / 1e6:.1f}",
            f"{numbers['peak'] / 1e6:.0f}",
        )
    return table


def measured_apart(way: str) -> dict[str, float]:
    """The numbers of one way, from a process of its own: the peak is of the process."""
    told = subprocess.run(
        [sys.executable, __file__, way], check=True, capture_output=True, text=True
    )
    numbers: dict[str, float] = json.loads(told.stdout)
    return numbers


def measure(way: str) -> dict[str, float]:
    """Time, memory of the graph and peak of a few training steps."""
    preset = find_preset(NAME)
    if way == "unrolled":  # as many steps as the solver evaluates, all of them in the graph
        steps = preset.task.deq.f_max_iter
        preset = preset.with_deq(ift=False, f_max_iter=0, grad=[steps])
    torch.manual_seed(0)
    model = preset.task.build()
    optimizer = preset.optim.make(model.parameters())
    seconds, held = [], 0
    before = forget_peak()
    for step in range(STEPS + 1):
        began = time.perf_counter()
        graph = train_step(preset, model, optimizer, step, weigh=step == 0)
        seconds.append(time.perf_counter() - began)
        held = max(held, graph)
    return {"seconds": median(seconds[1:]), "graph": held, "peak": resident_peak() - before}


def forget_peak() -> int:
    """Let the peak of this process start from now, where Linux allows; bytes in use."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return resident_peak()


def resident_peak() -> int:
    """The most bytes of memory that this process has used."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024
    except OSError:  # not Linux: the peak since the process began
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def train_step(
    preset: Preset, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, weigh: bool
) -> int:
    """One update; returns the bytes that the graph holds, if asked."""
    saved: dict[int, int] = {}

    def note(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return t

    batch = preset.task.train_batch(step, preset.seed, Shard())
    optimizer.zero_grad(set_to_none=True)
    if weigh:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            loss = preset.task.loss(model, batch, None)
    else:
        loss = preset.task.loss(model, batch, None)
    loss.value.backward()
    optimizer.step()
    for parameter in model.parameters():
        saved.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(saved.values())


if __name__ == "__main__":
    if len(sys.argv) == 2:
        print(json.dumps(measure(sys.argv[1])))
    else:
        try:
            main()
        except ZooError as error:
            sys.exit(str(error))
