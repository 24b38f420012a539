"""Processes for tests: each runs the same cases, in order, under a time-out."""

from __future__ import annotations

import os
import queue
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Case = Callable[..., Any]
_ANSWER = 20.0  # seconds that a collective waits for the other processes


def run_together(
    folder: Path, world: int, cases: Mapping[str, tuple[Case, Sequence[Any]]], seconds: float
) -> dict[str, list[Any]]:
    """Run cases in `world` processes; return the results of each case, in the order of ranks.

    A case is a function of module level and its arguments. An exception becomes a text that starts
    with `ERROR`; the cases after it are still run. Processes that are not done in time are killed.

    Args:
        folder: an empty folder, in which the processes meet.
        world: the number of processes.
        cases: the functions with their arguments, by name.
        seconds: the time limit of all cases together, from the start of the processes.
    """
    context = mp.get_context("spawn")
    results: Any = context.Queue()
    store = f"file://{folder / 'store'}"
    # `args` go through a pipe that a process reads after its imports: no start waits for another.
    started = [
        context.Process(target=_run, args=(rank, world, store, dict(cases), results), daemon=True)
        for rank in range(world)
    ]
    for process in started:
        process.start()
    try:
        return _collect(results, started, list(cases), seconds)
    finally:
        for process in started:
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()


def _collect(
    results: Any, started: Sequence[Any], names: Sequence[str], seconds: float
) -> dict[str, list[Any]]:
    """Return the results of all processes; raise if one ends without them."""
    found: dict[str, list[Any]] = {name: ["not run"] * len(started) for name in names}
    missing, deadline = len(names) * len(started), time.monotonic() + seconds
    while missing:
        try:
            rank, name, value = results.get(timeout=0.2)
        except queue.Empty:
            ended = [p.exitcode for p in started if p.exitcode not in (None, 0)]
            if ended or time.monotonic() > deadline:
                open_cases = [name for name in names if "not run" in found[name]]
                why = f"exit codes {ended}" if ended else f"more than {seconds} s"
                raise RuntimeError(f"processes did not end: {why}; at {open_cases[:3]}") from None
            continue
        found[name][rank] = value
        missing -= 1
    return found


def _run(rank: int, world: int, store: str, cases: dict[str, Any], results: Any) -> None:
    """Run all cases in one process."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    timeout = timedelta(seconds=_ANSWER)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=timeout)
    for name, (case, arguments) in cases.items():
        dist.barrier()
        torch.manual_seed(0)
        try:
            value = case(*arguments)
        except Exception as error:
            value = f"ERROR {type(error).__name__}: {error}\n{traceback.format_exc()}"
        results.put((rank, name, value))
    dist.barrier()
    dist.destroy_process_group()
