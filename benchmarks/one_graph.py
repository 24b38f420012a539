"""What does one evaluation cost once the whole solve is one graph? Plain iteration on 32 x 64.

`python -m benchmarks.one_graph --python PATH` times, in turns and with one thread each: bare calls
of `f`, the library, and the exported program compiled by torch, compiled ahead of time, and in
onnxruntime; beside them the compiled loop of jaxopt. PATH is the Python of an environment with
jaxopt, see `benchmarks/rivals.py`. The numbers are microseconds per evaluation of `f`: the time of
a solve to a relative residual of 1e-5, divided by its evaluations. They go to
`results/one_graph.json`.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import cases
from benchmarks.cases import Case
from benchmarks.contest import interleave
from benchmarks.gauge import seconds
from benchmarks.rivals import GOAL, jax_rivals, use_one_thread
from benchmarks.spread import Spread
from benchmarks.storing import RESULTS, store
from benchmarks.table import render
from torchdeq import FixedPointIter, StopRule, export, solve

STOP = StopRule(max_iter=400, tol=GOAL, mode="rel")
JAXOPT = "jaxopt plain"
BARE = "bare f"


@dataclass(frozen=True)
class Contestant:
    """A way to solve: its evaluations in one solve, and a function that times solves."""

    name: str
    evaluations: int
    time: Callable[[float], float]  # seconds of one solve, measured for at least so long


@dataclass(frozen=True)
class Row:
    """Microseconds per evaluation, and their ratio to bare calls of `f`."""

    name: str
    evaluations: int
    micros: Spread
    to_bare: Spread


def contestants(case: Case, folder: Path, aoti: bool) -> list[Contestant]:
    """Return the contestants of this library."""
    (W,), x = case.weights, case.x
    assert x is not None

    def f(z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(torch.addmm(x, z, W))

    def eager() -> int:
        return solve(f, case.z0, FixedPointIter(), STOP, args=(x,)).stats.nfe

    n = eager()

    def bare() -> None:
        z = case.z0
        for _ in range(n):
            z = f(z, x)

    program = export.export(f, (x,), FixedPointIter(), STOP, start=case.z0)
    inputs = (case.z0, x)
    compiled = torch.compile(program.module())
    runs: dict[str, Callable[[], object]] = {BARE: bare, "library": eager}
    counts = {BARE: n, "library": n}
    graphs: dict[str, Callable[[], dict[str, Tensor]]] = {
        "one graph, torch.compile": lambda: compiled(*inputs)
    }
    if aoti:
        package = export.load_aoti(export.to_aoti(program, folder / "model.pt2"))
        graphs["one graph, AOTInductor"] = lambda: package(*inputs)
    for name, run in graphs.items():
        runs[name], counts[name] = run, int(run()["evaluations"])
    runs["one graph, onnxruntime"], counts["one graph, onnxruntime"] = _onnx(program, folder)
    return [Contestant(name, counts[name], partial(seconds, run)) for name, run in runs.items()]


def _onnx(program: torch.export.ExportedProgram, folder: Path) -> tuple[Callable[[], object], int]:
    """Return a solve in onnxruntime with one thread, and its evaluations."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    path = export.to_onnx(program, folder / "model.onnx")
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    assert program.example_inputs is not None
    values = [t.numpy() for t in program.example_inputs[0]]
    names = [node.name for node in session.get_inputs()]
    inputs = dict(zip(names, values, strict=True))
    (count,) = session.run(["evaluations"], inputs)
    return lambda: session.run(None, inputs), int(count)


def measure(
    case: Case, python: str | None, rounds: int, least: float, aoti: bool = True
) -> list[Row]:
    """Return a row for every contestant, timed in turns."""
    with tempfile.TemporaryDirectory() as folder, jax_rivals(python, {"mlp": case}) as rivals:
        ways = contestants(case, Path(folder), aoti)
        for rival in rivals:
            if rival.name == JAXOPT:
                tol, _ = rival.tolerance("mlp")
                assert tol is not None
                count = rival.count("mlp", tol)
                ways.append(Contestant(rival.name, count, partial(rival.time, "mlp", tol)))
        turns = {way.name: partial(way.time, least) for way in ways}
        times = interleave(turns, rounds, seconds=600, least=1)
    each = {w.name: [1e6 * t / w.evaluations for t in times[w.name]] for w in ways}
    rows = []
    for way in ways:
        ratios = [a / b for a, b in zip(each[way.name], each[BARE], strict=True)]
        spread = Spread.of(each[way.name])
        rows.append(Row(way.name, way.evaluations, spread, Spread.of(ratios)))
    return rows


def show(rows: list[Row]) -> str:
    """Return the table as text."""
    header = ["contestant", "evaluations", "us per evaluation", "iqr", "to bare f"]
    table = [
        [
            row.name,
            str(row.evaluations),
            f"{row.micros.median:.2f}",
            row.micros.percent,
            f"{row.to_bare.median:.2f}",
        ]
        for row in rows
    ]
    text = render(header, table, texts=1)
    by_name = {row.name: row.micros.median for row in rows}
    if JAXOPT in by_name and "one graph, AOTInductor" in by_name:
        ratio = by_name["one graph, AOTInductor"] / by_name[JAXOPT]
        text += f"\nAOTInductor to jaxopt: {ratio:.2f}"
    return text


def main() -> None:
    """Run the comparison, print it and save it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.one_graph", description=__doc__)
    parser.add_argument("--python", help="of the environment with jaxopt")
    parser.add_argument("--rounds", type=int, default=7, help="turns per contestant")
    parser.add_argument("--quick", action="store_true", help="one short round; not saved")
    options = parser.parse_args()
    use_one_thread("benchmarks.one_graph")
    torch.set_grad_enabled(False)
    rounds, least = (1, 0.05) if options.quick else (options.rounds, 0.3)
    rows = measure(cases.mlp(32, 64), options.python, rounds, least)
    print(show(rows))
    if not options.quick:
        answers = {"goal": GOAL, "rounds": rounds, "rows": [asdict(row) for row in rows]}
        store(RESULTS / "one_graph.json", answers, seeds=[0])


if __name__ == "__main__":
    main()
