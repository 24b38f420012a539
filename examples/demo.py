"""Train a small MDEQ on real digits, then compare it with the same network unrolled.

`make demo`: about a minute of training with live progress; leaves `demo/report.html`.
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

import deq_zoo
from deq_zoo.errors import ZooError
from deq_zoo.preset import Preset, find_preset
from deq_zoo.task import WHOLE

NAME, OUT = "mdeq-quick", Path("demo")
STEPS = 20  # timed of each way to train
WAYS = ("equilibrium", "unrolled")


def main() -> None:
    console = Console()
    console.print(f"[bold]{NAME}[/bold]: an equilibrium network learns handwritten digits")
    result = deq_zoo.train(NAME, out=OUT, force=True, cpu=True)
    if not result.finished:
        return
    solver = list(result.run.lines("test"))[-1]["solver"]
    console.print(
        f"\ntest accuracy [bold]{result.test['accuracy']:.1f} %[/bold] on 1,000 digits that played "
        f"no part in training (step {result.best_step} was chosen on others), after "
        f"{result.seconds:.0f} s; {solver['nfe']:.1f} evaluations of f per solve, relative "
        f"residual {solver['residual']:.1e}\n"
    )
    console.print(compare([measured_apart(way) for way in WAYS]))
    console.print(f"\nlook at [bold]{result.run.report}[/bold]")


def compare(measurements: list[dict[str, float]]) -> Table:
    """Return a table with one row for each way to train."""
    table = Table(
        "training", "s a step", "MB in the graph", "MB more at the peak", title_justify="left"
    )
    for way, numbers in zip(WAYS, measurements, strict=True):
        table.add_row(
            way,
            f"{numbers['seconds']:.3f}",
            f"{numbers['graph'] / 1e6:.1f}",
            f"{numbers['peak'] / 1e6:.0f}",
        )
    return table


def measured_apart(way: str) -> dict[str, float]:
    """Measure one way to train in a new process: the peak belongs to a process."""
    process = subprocess.run(
        [sys.executable, __file__, way], check=True, capture_output=True, text=True
    )
    numbers: dict[str, float] = json.loads(process.stdout)
    return numbers


def measure(way: str) -> dict[str, float]:
    """Return the time, the memory of the graph and the peak of a few training steps."""
    preset = find_preset(NAME)
    if way == "unrolled":  # as many steps as the solver evaluates, all of them in the graph
        steps = preset.task.deq.f_max_iter
        preset = preset.with_deq(ift=False, f_max_iter=0, grad=[steps])
    torch.manual_seed(0)
    model = preset.task.build()
    optimizer = preset.optim.make(model.parameters())
    seconds, graph_bytes = [], 0
    before = forget_peak()
    for step in range(STEPS + 1):
        began = time.perf_counter()
        graph = train_step(preset, model, optimizer, step, weigh=step == 0)
        seconds.append(time.perf_counter() - began)
        graph_bytes = max(graph_bytes, graph)
    return {"seconds": median(seconds[1:]), "graph": graph_bytes, "peak": resident_peak() - before}


def forget_peak() -> int:
    """Reset the peak of this process, if Linux allows it; return the bytes in use."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return resident_peak()


def resident_peak() -> int:
    """Return the peak of the memory that this process has used, in bytes."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024
    except OSError:  # not Linux: the peak since the process began
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def train_step(
    preset: Preset, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, weigh: bool
) -> int:
    """Update the model once; return the bytes that the graph keeps if `weigh` is set."""
    saved: dict[int, int] = {}

    def record(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return t

    batch = preset.task.train_batch(step, preset.seed, WHOLE)
    optimizer.zero_grad(set_to_none=True)
    if weigh:
        with torch.autograd.graph.saved_tensors_hooks(record, lambda t: t):
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
