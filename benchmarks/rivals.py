"""How long do other libraries take to the same residual? jaxopt and optimistix, jitted, and SciPy.

`python -m benchmarks.rivals --python PATH` runs all contestants in turns, one thread each, and
saves `results/rivals.json`; with `--count` it only counts the evaluations of our own solvers, for
`results/rival_evaluations.json`. PATH is the Python of an environment made for it:

    python3 -m venv .bench/jax
    .bench/jax/bin/python -m pip install "jax[cpu]" jaxopt optimistix

Each contestant gets the loosest of its own tolerances, by factors of three, at which every sample
of the batch has a relative residual of at most 1e-5; the residual is computed without its help. The
search for it ends after 30 seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import torch

from benchmarks import cases
from benchmarks.cases import Case, residual
from benchmarks.contest import ROOT, interleave
from benchmarks.gauge import seconds
from benchmarks.ours import solve
from benchmarks.spread import Spread
from benchmarks.storing import RESULTS, store
from benchmarks.table import render

GOAL = 1e-5
SEARCH = 30.0  # seconds for a contestant to find its tolerance
MAPS = {"mlp": (32, 64), "wide": (32, 1024), "cell": (64, 256)}
QUICK = ("mlp",)
OURS = ("fixed_point_iter", "anderson", "broyden")
SCIPY = ("anderson", "broyden1", "krylov")
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
    "TF_NUM_INTRAOP_THREADS": "1",
    "JAX_PLATFORMS": "cpu",
}


@dataclass(frozen=True)
class Row:
    """The time of one contestant to the residual; None if it does not get there."""

    case: str
    contestant: str
    tol: float | None
    residual: float | None
    time: Spread | None


class Rival:
    """A contestant: the residual it reaches for its own tolerance, and its time."""

    def __init__(
        self,
        name: str,
        reach: Callable[[str, float], float],
        time: Callable[[str, float, float], float],
        count: Callable[[str, float], int] | None = None,
    ) -> None:
        self.name, self.reach, self.time = name, reach, time
        self._count = count

    def count(self, case: str, tol: float) -> int:
        """Return the evaluations of one solve, of contestants that count them."""
        assert self._count is not None
        return self._count(case, tol)

    def tolerance(self, case: str) -> tuple[float | None, float | None]:
        """Return the loosest tolerance that gives the residual, and this residual."""
        end = monotonic() + SEARCH
        for k in range(10):
            tol = GOAL / 3**k
            if (reached := self.reach(case, tol)) <= GOAL:
                return tol, reached
            if monotonic() > end:
                break
        return None, None


def problems() -> dict[str, Case]:
    """Return the maps of the comparison."""
    (b, d), (wb, wd), (cb, cd) = MAPS["mlp"], MAPS["wide"], MAPS["cell"]
    return {
        "mlp": cases.mlp(b, d),
        "wide": cases.mlp(wb, wd),
        "cell": cases.cell(cb, cd, 4 * cd),
    }


def weights(made: dict[str, Case]) -> dict[str, Any]:
    """Return the weights and inputs of all maps, for the other libraries."""
    arrays: dict[str, Any] = {}
    for name, case in made.items():
        assert case.x is not None
        letters = ("W",) if len(case.weights) == 1 else ("U", "D")
        tensors = dict(zip(letters, case.weights, strict=True)) | {"x": case.x}
        arrays |= {f"{name}_{letter}": t.numpy() for letter, t in tensors.items()}
    return arrays


def own(name: str, made: dict[str, Case]) -> Rival:
    """Return a solver of this library."""

    def run(case: str, tol: float) -> Any:
        return solve(made[case].f, made[case].z0, name, 400, tol)[0]

    def count(case: str, tol: float) -> int:
        calls = 0

        def f(z: Any) -> Any:
            nonlocal calls
            calls += 1
            return made[case].f(z)

        solve(f, made[case].z0, name, 400, tol)
        return calls

    return Rival(
        f"ours {name}",
        lambda case, tol: residual(made[case], run(case, tol)),
        lambda case, tol, least: seconds(lambda: run(case, tol), least),
        count,
    )


def scipy(name: str, made: dict[str, Case]) -> Rival:
    """Return a solver of SciPy, which sees the batch as one vector of numpy numbers."""
    import scipy.optimize

    method = {"krylov": scipy.optimize.newton_krylov}.get(name) or getattr(scipy.optimize, name)

    def run(case: str, tol: float) -> Any:
        f, z0 = made[case].f, made[case].z0

        def gap(z: Any) -> Any:
            t = torch.from_numpy(z.astype(np.float32)).view_as(z0)
            return (f(t) - t).flatten().numpy().astype(np.float64)

        size = z0.numel() ** 0.5
        try:
            z = method(gap, z0.flatten().double().numpy(), f_tol=tol * size, maxiter=400,
                       tol_norm=np.linalg.norm)  # fmt: skip
        except scipy.optimize.NoConvergence as error:
            z = error.args[0]
        except ValueError:  # newton_krylov, where differences vanish in the rounding of f
            return torch.full_like(z0, torch.nan)
        return torch.from_numpy(np.asarray(z, dtype=np.float32)).view_as(z0)

    return Rival(
        f"scipy {name}",
        lambda case, tol: residual(made[case], run(case, tol)),
        lambda case, tol, least: seconds(lambda: run(case, tol), least),
    )


@contextmanager
def jax_rivals(python: str | None, made: dict[str, Case]) -> Iterator[list[Rival]]:
    """Start the process of the JAX libraries; without its Python there are no such rivals."""
    if python is None:
        yield []
        return
    with tempfile.TemporaryDirectory() as folder:
        np.savez(Path(folder) / "weights.npz", **weights(made))
        process = subprocess.Popen(
            [python, str(ROOT / "benchmarks" / "jax_worker.py"), f"{folder}/weights.npz"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            names = _ask(process, op="hello")["solvers"]
            yield [_jax(process, name) for name in names]
        finally:
            process.kill()
            process.communicate()


def _jax(process: subprocess.Popen[str], name: str) -> Rival:
    ask = partial(_ask, process, solver=name)
    return Rival(
        name,
        lambda case, tol: float(ask(op="residual", case=case, tol=tol)["residual"]),
        lambda case, tol, least: float(ask(op="time", case=case, tol=tol, least=least)["seconds"]),
        lambda case, tol: int(ask(op="count", case=case, tol=tol)["evaluations"]),
    )


def _ask(process: subprocess.Popen[str], **request: Any) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    print(json.dumps(request), file=process.stdin, flush=True)
    line = process.stdout.readline()
    if not line:
        raise RuntimeError("the process of the JAX libraries ended, see its error above")
    reply: dict[str, Any] = json.loads(line)
    if "error" in reply:
        raise RuntimeError(f"{request}: {reply['error']}")
    return reply


def compare(case: str, rivals: list[Rival], rounds: int, least: float) -> list[Row]:
    """Return a row for every contestant, timed in turns."""
    reached = {rival.name: rival.tolerance(case) for rival in rivals}
    turns = {}
    for rival in rivals:
        tol = reached[rival.name][0]
        if tol is not None:
            turns[rival.name] = partial(rival.time, case, tol, least)
    times = interleave(turns, rounds, seconds=60, least=3 if rounds > 1 else 1)
    spread = {name: Spread.of(values) for name, values in times.items()}
    return [Row(case, name, *found, spread.get(name)) for name, found in reached.items()]


def count_ours(made: dict[str, Case]) -> list[dict[str, Any]]:
    """Return the evaluations of our own solvers to the residual, by map."""
    rows = []
    for case in made:
        for rival in (own(name, made) for name in OURS):
            tol, _ = rival.tolerance(case)
            assert tol is not None, (case, rival.name)
            rows.append(
                {"case": case, "contestant": rival.name, "evaluations": rival.count(case, tol)}
            )
    return rows


def show(rows: list[Row]) -> str:
    """Return the table as text."""
    header = ["case", "contestant", "own tolerance", "residual", "ms", "iqr"]
    table = []
    for row in rows:
        if row.time is None or row.tol is None or row.residual is None:
            table.append([row.case, row.contestant, "-", "not reached", "-", "-"])
            continue
        numbers = [f"{row.tol:.1e}", f"{row.residual:.1e}", f"{1e3 * row.time.median:.2f}"]
        table.append([row.case, row.contestant, *numbers, row.time.percent])
    return render(header, table, texts=2)


def use_one_thread(module: str) -> None:
    """Keep this process and those it starts on one core; start `module` again if need be.

    Numpy reads the environment variables that limit its threads when it is imported, which has
    happened.
    """
    if any(os.environ.get(name) != value for name, value in ONE_THREAD.items()):
        again = [sys.executable, "-m", module, *sys.argv[1:]]
        os.execve(sys.executable, again, os.environ | ONE_THREAD)
    if hasattr(os, "sched_setaffinity"):  # Linux
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)


def main() -> None:
    """Run the comparison, print it and save it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rivals", description=__doc__)
    parser.add_argument("--python", help="of the environment with jaxopt and optimistix")
    parser.add_argument("--rounds", type=int, default=7, help="turns per contestant")
    parser.add_argument("--count", action="store_true", help="evaluations of ours, no times")
    parser.add_argument("--quick", action="store_true", help="one map, one round; not saved")
    options = parser.parse_args()
    use_one_thread("benchmarks.rivals")
    torch.set_grad_enabled(False)
    made = problems()
    if options.count:
        counts = count_ours(made)
        print(*counts, sep="\n")
        store(RESULTS / "rival_evaluations.json", {"goal": GOAL, "rows": counts}, seeds=[0])
        return
    rounds, least = (1, 0.01) if options.quick else (options.rounds, 0.2)
    with jax_rivals(options.python, made) as others:
        rivals = [own(n, made) for n in OURS] + [scipy(n, made) for n in SCIPY] + others
        rows = []
        for case in QUICK if options.quick else MAPS:
            rows += compare(case, rivals, rounds, least)
    print(show(rows))
    if not options.quick:
        answers = {"goal": GOAL, "rounds": rounds, "rows": [asdict(row) for row in rows]}
        store(RESULTS / "rivals.json", answers, seeds=[0])


if __name__ == "__main__":
    main()
