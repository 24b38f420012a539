"""Training batches, made by threads while the model computes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count

from deq_zoo.preset import Preset
from deq_zoo.task import Batch, Shard


@contextmanager
def closing_batches(
    preset: Preset, first: int, shard: Shard, ahead: int = 2
) -> Iterator[Iterator[Batch]]:
    """Open the training batches of a preset without end; leaving the block stops the threads.

    Args:
        preset: task and seed.
        first: the number of the batch to begin with.
        shard: the part of every batch to make.
        ahead: batches made before they are asked for.
    """

    def make(k: int) -> Future[Batch]:
        return pool.submit(preset.task.train_batch, k, preset.seed, shard)

    def batches() -> Iterator[Batch]:
        pending = [make(k) for k in range(first, first + ahead)]
        for k in count(first + ahead):
            yield pending.pop(0).result()
            pending.append(make(k))

    pool = ThreadPoolExecutor(max_workers=ahead)
    try:
        yield batches()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
