"""Instruments: the time of a run, and the memory it takes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection
from time import process_time
from weakref import WeakSet

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.autograd.profiler import profile


def seconds(run: Callable[[], object], least: float) -> float:
    """Return the mean time of one run, over at least `least` seconds, without garbage collection.

    The time is that of the processor: with one thread, without the time of other programs.
    """
    gc.collect()
    gc.disable()
    count, start = 0, process_time()
    while (elapsed := process_time() - start) < least or not count:
        run()
        count += 1
    gc.enable()
    return elapsed / count


def peak_bytes(run: Callable[[], object]) -> int:
    """Return the highest sum of live allocations of torch's CPU allocator.

    The allocator reports every allocation and release to the profiler, so the number is exact and
    has no noise; the resident size of a process also contains memory that was freed before.
    """
    gc.collect()
    with profile(profile_memory=True) as record:
        run()
    assert record.kineto_results is not None
    events = [e for e in record.kineto_results.events() if e.name() == "[memory]"]
    now = top = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        top = max(top, now)
    return top


def held_bytes(run: Callable[[], object], given: Collection[Tensor]) -> int:
    """Return the bytes that the graph of the result keeps, without the tensors `given`."""
    kept: WeakSet[_Kept] = WeakSet()

    def pack(t: Tensor) -> _Kept:
        kept.add(saved := _Kept(t))
        return saved

    with saved_tensors_hooks(pack, lambda saved: saved.tensor):
        result = run()
    storages = {t.data_ptr(): t.nbytes() for t in (s.tensor.untyped_storage() for s in kept)}
    for t in given:
        storages.pop(t.untyped_storage().data_ptr(), None)
    del result
    return sum(storages.values())


class _Kept:
    """A saved tensor, alive as long as the graph that saved it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
