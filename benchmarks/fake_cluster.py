"""One process that acts as rank 0 of many: collectives are counted, tensors have no values.

Torch's fake process group returns from every collective at once, and `FakeTensorMode` gives tensors
shapes, dtypes and storages without memory. So a training step of any size runs in seconds, with the
collectives and allocations of a real one. Torch's own tests of sharding work in this way.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # noqa: F401  collectives of fake tensors
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from torchdeq import numbers
from torchdeq.aliasing import WriteGuard

#: Collectives by the name of their operation.
KINDS = {
    "_allgather_base_": "all-gather",
    "allgather_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
    "broadcast_": "broadcast",
}


@contextmanager
def fake_cluster(world: int) -> Iterator[None]:
    """Act as rank 0 of `world` processes, with tensors that have no values.

    The host reads no value of a solve, as on an accelerator: there are none to read.
    """
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    reads, check = numbers.reads_are_free, WriteGuard.check
    numbers.reads_are_free = lambda device: False
    # It compares addresses, which these tensors do not have.
    WriteGuard.check = lambda *args: None  # type: ignore[method-assign]
    try:
        with FakeTensorMode():
            yield
    finally:
        numbers.reads_are_free, WriteGuard.check = reads, check  # type: ignore[method-assign]
        dist.destroy_process_group()


class ClusterMeter(TorchDispatchMode):
    """A mode that counts collectives, the bytes they move, and the bytes of living tensors.

    Args:
        world: the number of processes.
    """

    def __init__(self, world: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.world = world
        self.collectives: Counter[str] = Counter()
        self.moved: Counter[str] = Counter()  # bytes that one rank receives, with ring algorithms
        self.peak: dict[str, int] = {}
        self._allocated = 0  # bytes at the last look, and of all allocations since
        self._kinds: Any = WeakIdKeyDictionary(ref_type=weakref.ref)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its operations on shards come next
        out = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func.overloadpacket.__name__, args)
        sharding = func.namespace in ("c10d", "_c10d_functional", "fsdp")
        if sharding:
            self.tag("sharding", tree_leaves((args, kwargs, out)), again=True)
        self._allocated += self.tag("activations", tree_leaves(out))
        if sharding or self._allocated > sum(self.peak.values()):
            self._look()
        return out

    def tag(self, kind: str, values: Iterable[Any], again: bool = False) -> int:
        """Name the kind of memory that tensors take; return the bytes that had no name.

        Args:
            kind: the name.
            values: the tensors; anything else is left alone.
            again: whether a tensor that counted as an activation gets the new name.
        """
        new = 0
        for value in values:
            t = value.to_local() if isinstance(value, DTensor) else value
            if not isinstance(t, Tensor):
                continue
            storage = t.untyped_storage()
            known = self._kinds.get(storage)
            if known is None or (again and known == "activations"):
                self._kinds[storage] = kind
                new += storage.nbytes() if known is None else 0
        return new

    def _look(self) -> None:
        """Keep the bytes by kind if their sum is the largest so far."""
        now: Counter[str] = Counter()
        for storage, kind in self._kinds.items():
            now[kind] += storage.nbytes()  # 0 for weights that were freed by resizing
        self._allocated = now.total()
        if now.total() > sum(self.peak.values()):
            self.peak = dict(now)

    def _count(self, name: str, args: Any) -> None:
        kind = KINDS.get(name)
        if kind is None:
            return
        self.collectives[kind] += 1
        sizes = [t.numel() * t.element_size() for t in tree_leaves(args) if isinstance(t, Tensor)]
        whole, share = max(sizes), (self.world - 1) / self.world
        if name in ("all_gather_into_tensor",):
            whole *= self.world  # its argument is the shard
        self.moved[kind] += int(whole * share * (2 if kind == "all-reduce" else 1))
