"""When does it pay to compile f, and to let finished samples leave the batch?

Both ways solve the same problem in turns; ratios are medians of rounds. Compiling itself, seconds
to minutes, is not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import process_time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d

from benchmarks.help import answer_help
from benchmarks.storing import RESULTS, store
from torchdeq import FixedPointIter, StopRule, get_deq, solve

FILE = RESULTS / "choices.json"
ROUNDS = 7


def main() -> None:
    torch.set_num_threads(1)
    answers = {"compiled": compiled(), "compacted": compacted()}
    for name, rows in answers.items():
        for row in rows:
            print(name, row)
    store(FILE, answers, seeds=[0])


def compiled() -> list[dict[str, Any]]:
    """Return the time of a training step with a compiled f, relative to a plain one."""
    shapes = {"one layer, 32 x 64": (32, 64, 0), "block of two layers, 512 x 512": (512, 512, 2048)}
    return [{"map": name, "ratio": _compiled(*shape)} for name, shape in shapes.items()]


def _compiled(batch: int, width: int, hidden: int) -> float:
    torch.manual_seed(0)
    x = 0.1 * torch.randn(batch, width)
    layer: nn.Module = nn.Linear(width, width)
    if hidden:
        layer = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)
        )

    def step(deq: nn.Module) -> Callable[[], None]:
        def run() -> None:
            states, _ = deq(lambda z: torch.tanh(0.3 * layer(z) + x), torch.zeros_like(x))
            states[-1].square().sum().backward()

        return run

    options: dict[str, Any] = {"f_max_iter": 20, "f_tol": 0.0, "ift": True, "b_solver": "gmres"}
    options |= {"b_max_iter": 10, "b_tol": 0.0}
    return ratio(step(get_deq(compile_f=True, **options)), step(get_deq(**options)))


def compacted() -> list[dict[str, Any]]:
    """Return the time of whole batches relative to compacted ones, by cost of f and difficulty."""
    rows = []
    for channels in (4, 16, 32):
        for hard in (1, 0):
            gain = torch.full((32, 1, 1, 1), 0.6)
            gain[:hard] = 0.97
            rows.append({"channels": channels, "hard": hard, **_compacted(channels, gain)})
    return rows


def _compacted(channels: int, gain: Tensor) -> dict[str, float]:
    rng = torch.Generator().manual_seed(0)
    x = 0.02 * torch.randn(32, channels, 16, 16, generator=rng)
    kernel = torch.randn(channels, channels, 3, 3, generator=rng)
    v = x[:1]
    for _ in range(30):  # power iteration
        v = conv2d(v / v.norm(), kernel, padding=1)
    kernel = kernel / v.norm()
    stop = StopRule(300, 1e-5, "rel")

    def f(z: Tensor, x: Tensor, gain: Tensor) -> Tensor:
        return torch.tanh(gain * conv2d(z, kernel, padding=1) + x)

    def run(compact: bool) -> Callable[[], object]:
        z0, args = torch.zeros_like(x), (x, gain)
        return lambda: solve(
            f, z0, FixedPointIter(), stop, args=args, compact=compact, on_failure="ignore"
        )

    operations = 2 * 9 * channels * channels * 256 * 32
    return {"operations": operations, "speed_up": ratio(run(False), run(True))}


def ratio(one: Callable[[], object], other: Callable[[], object]) -> float:
    """Return the time of the first relative to the second, the median of rounds."""
    one(), other()
    ratios = []
    for _ in range(ROUNDS):
        times = []
        for run in (one, other):
            began = process_time()
            for _ in range(5):
                run()
            times.append(process_time() - began)
        ratios.append(times[0] / times[1])
    return median(ratios)


if __name__ == "__main__":
    answer_help(__doc__)
    main()
