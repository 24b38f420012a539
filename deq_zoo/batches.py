"""Training batches, made by worker processes while the model computes.

Batch `k` is a function of `k` and the seed, so the sampler is a counter: batches are the same with
any number of workers, and a run can go on from any of them.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, count
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from deq_zoo.errors import ZooError
from deq_zoo.preset import Preset
from deq_zoo.task import Batch, Shard

_MOST_WORKERS = 8
_PATIENCE = 300.0  # seconds that a batch may take
_ADVICE = "--set workers=0 makes batches without worker processes"


@contextmanager
def open_batches(
    preset: Preset,
    first: int,
    shard: Shard,
    *,
    pin_memory: bool = False,
    patience: float = _PATIENCE,
) -> Iterator[Iterator[Batch]]:
    """Open the training batches of a preset without end; leaving the block ends the workers.

    The first batch is made by this process: its imports and errors come before there are workers.

    Args:
        preset: task, seed and number of workers.
        first: the number of the batch to begin with.
        shard: the part of every batch to make.
        pin_memory: copy batches to memory from which an accelerator reads faster.
        patience: seconds after which a worker that has made no batch counts as stuck.
    """
    beginning = preset.task.train_batch(first, preset.seed, shard)
    workers = count_workers(preset)
    before = set(multiprocessing.active_children())
    with _signals_blocked():
        following = _checked(iter(_loader(preset, first + 1, shard, workers, pin_memory, patience)))
    children = set(multiprocessing.active_children()) - before
    try:
        yield chain([beginning], following)
    except RuntimeError as error:  # torch raises some of them in the middle of the block
        if "DataLoader" not in str(error):
            raise
        raise ZooError(_explain(str(error), workers)) from None
    finally:
        following.close()  # torch asks the workers to end, unless an error still refers to them
        _kill(children)


def count_workers(preset: Preset) -> int:
    """Return the number of worker processes: the preset's, or one by the machine and the task.

    Without the preset's, batches that cost little get none. Costly ones get the cores that this
    process has for itself, except one for the model.
    """
    if preset.workers is not None:
        return preset.workers
    if not preset.task.costly_batches:
        return 0
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # of this run, on this machine
    return min(_MOST_WORKERS, max(1, cores // processes - 1))


class _Batches(Dataset[Any]):
    """The training batches of a preset by their numbers."""

    def __init__(self, preset: Preset, shard: Shard) -> None:
        self.preset, self.shard = preset, shard

    def __getitem__(self, k: int) -> Batch | ZooError:
        try:
            return self.preset.task.train_batch(k, self.preset.seed, self.shard)
        except ZooError as error:  # torch would put the worker's traceback into its message
            return error


class _Counter(Sampler[int]):
    """The numbers of the batches, from `first` on."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __iter__(self) -> Iterator[int]:
        return count(self.first)


def _loader(
    preset: Preset, first: int, shard: Shard, workers: int, pin_memory: bool, patience: float
) -> DataLoader[Any]:
    # A forked worker shares the data that is open already. It computes with one thread, as torch
    # sets it: OpenMP's threads of the parent process do not exist in it.
    fork = workers > 0 and sys.platform == "linux"
    return DataLoader(
        _Batches(preset, shard),
        batch_size=None,
        sampler=_Counter(first),
        num_workers=workers,
        collate_fn=_as_it_is,
        pin_memory=pin_memory,
        timeout=patience if workers else 0,
        multiprocessing_context="fork" if fork else None,
        generator=torch.Generator(),  # the global one belongs to the model
    )


def _as_it_is(batch: Batch) -> Batch:
    return batch


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block Ctrl-C and SIGTERM in the processes that start within a block.

    Such signals often come to a whole group. The training process ends its workers when it is done.
    """
    if sys.platform == "win32":
        yield
        return
    former = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def _checked(batches: Iterator[Any]) -> Generator[Batch]:
    for batch in batches:
        if isinstance(batch, ZooError):
            raise batch
        yield batch


def _kill(children: Iterable[BaseProcess]) -> None:
    """End worker processes that did not end when torch asked them, e.g. because they are stuck."""
    alive = [child for child in children if child.is_alive()]
    if not alive:
        return
    listens = threading.current_thread() is threading.main_thread()
    if listens:  # torch's handler would raise an error for every killed worker
        handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for child in alive:
        child.kill()
        child.join()
    if listens:
        signal.signal(signal.SIGCHLD, handler)


def _explain(error: str, workers: int) -> str:
    """Return an error of torch's loader as a sentence for users."""
    if "timed out" in error:
        return (
            f"none of the {workers} worker processes has made a batch for a long time: the disk of "
            f"the data may be stuck, or a worker; {_ADVICE}"
        )
    reason = " ".join(error.split())
    return (
        f"a worker process that makes batches has ended ({reason}): there may be too little memory "
        f"or shared memory for {workers} of them; {_ADVICE}, or choose fewer"
    )
