"""Several processes that train one model, as a launcher starts them."""

from __future__ import annotations

import logging
import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Sequence
from multiprocessing.context import ForkProcess
from pathlib import Path

import torch.utils.tensorboard  # noqa: F401
from torch import nn, optim

import deq_zoo.sharding  # noqa: F401
from deq_zoo.cli import main

_FORK = multiprocessing.get_context("fork")  # what is imported already need not be imported again
optim.Adam([nn.Parameter()])  # the first one imports for seconds


def free_port() -> int:
    """Return a port that no process listens to."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def launch(folder: Path, world: int, *arguments: str, **environment: str) -> list[ForkProcess]:
    """Start `deq-zoo` in several processes that find each other; their output goes to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **environment}
    sizes = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    processes = []
    for rank in range(world):
        own = common | sizes | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        process = _FORK.Process(target=_run, args=(folder / f"{rank}.txt", arguments, own))
        process.start()
        processes.append(process)
    return processes


def finish(folder: Path, processes: list[ForkProcess], timeout: float = 60) -> list[str]:
    """Wait for processes; return the output of each, which ends with its exit code."""
    for process in processes:
        process.join(timeout)
    late = [process for process in processes if process.is_alive()]
    for process in late:
        process.kill()
    assert not late, f"{len(late)} processes did not end"
    return [
        f"{(folder / f'{rank}.txt').read_text()}exit {process.exitcode}"
        for rank, process in enumerate(processes)
    ]


def _run(output: Path, arguments: Sequence[str], environment: dict[str, str]) -> None:
    os.environ.update(environment)
    logging.getLogger().handlers.clear()  # those of pytest: messages go to the output
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.stdout = sys.stderr = open(1, "w", closefd=False)  # noqa: SIM115
        try:
            code = main(list(arguments))
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
    os._exit(code)
