"""The contestants, each in a process of its own, asked in turns so that machine noise hits both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

ROOT = Path(__file__).parent.parent
PUBLISHED = ROOT / ".bench" / "torchdeq-0.1.0"
OURS, OLD = "ours", "0.1.0"
K = TypeVar("K")
T = TypeVar("T")


class CellFailed(RuntimeError):
    """The error of a contestant, with its text."""


class Worker:
    """One contestant's process."""

    def __init__(self, name: str, process: subprocess.Popen[str]) -> None:
        self.name, self._process = name, process
        hello = self.ask("hello")
        self.solvers: list[str] = hello["solvers"]
        self.stopping: list[str] = hello["stopping"]

    def ask(self, op: str, **request: Any) -> dict[str, Any]:
        """Send one request and wait for its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps({"op": op, **request}), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of {self.name} ended, see its error above")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise CellFailed(f"{self.name}, {op} {request}: {reply['error']}")
        return reply


class Contest:
    """All contestants, and the cells of the tables that could not be filled."""

    def __init__(self, workers: list[Worker]) -> None:
        self.workers = workers
        self.failures: list[str] = []

    @property
    def solvers(self) -> list[str]:
        """Return the names of all registered solvers."""
        return self.workers[0].solvers

    def attempt(self, cell: Callable[[], T]) -> T | None:
        """Return a cell of a table, or None and a note if a contestant failed in it."""
        try:
            return cell()
        except CellFailed as error:
            self.failures.append(str(error))
            return None


def interleave(
    turns: Mapping[K, Callable[[], T]], rounds: int, seconds: float, least: int = 1
) -> dict[K, list[T]]:
    """Run all contestants in turns; if they are slow, for fewer rounds, but at least `least`."""
    answers: dict[K, list[T]] = {name: [] for name in turns}
    start = perf_counter()
    for done in range(rounds):
        if done >= least and perf_counter() - start > seconds:
            break
        for name, turn in turns.items():
            answers[name].append(turn())
    return answers


@contextmanager
def open_contest() -> Iterator[Contest]:
    """Start a worker for the library and, if it can be installed, one for torchdeq 0.1.0."""
    with ExitStack() as stack:
        workers = [Worker(OURS, stack.enter_context(_start("ours")))]
        if installed():
            old = stack.enter_context(_start("published", str(PUBLISHED)))
            workers.append(Worker(OLD, old))
        yield Contest(workers)


@contextmanager
def _start(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    quiet = {**os.environ, "KINETO_LOG_LEVEL": "99", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.worker", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=quiet,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def installed() -> bool:
    """Return whether torchdeq 0.1.0 is installed, after an attempt to install it."""
    if PUBLISHED.exists():
        return True
    part = PUBLISHED.with_name(f"{PUBLISHED.name}.part")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    done = subprocess.run([*pip, "--target", str(part), "torchdeq==0.1.0"])
    if done.returncode:
        print("torchdeq 0.1.0 could not be installed (see above): ours runs alone\n")
        return False
    part.rename(PUBLISHED)
    return True
