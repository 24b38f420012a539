"""The other processes of a distributed program, as the solves of one `f` meet them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from threading import get_ident
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from torchdeq._torch import normalises_over_batch
from torchdeq.distributed.collectives import announce, listening
from torchdeq.distributed.sharding import gathered, units_inside
from torchdeq.numbers import HOST, row_norm, small_dtype
from torchdeq.reach import reachable_modules

#: None decides by itself; True and "world" mean the group of all processes; False means never.
SyncStop = ProcessGroup | bool | Literal["world"] | None

_WORDS: dict[str, SyncStop] = {"auto": None, "world": "world", "true": "world", "false": False}


class Peers:
    """The processes that evaluate the same `f` at the same time, each on its own samples.

    Without a group, all decisions are those of this process alone and cost nothing. With a group,
    one all-reduce per decision makes it a decision of all processes. A group that the program has
    not named is found during the solve: by the first collective that `f` announces.

    Args:
        units: the units of `fully_shard` inside `f`.
        watched: modules inside `f` that communicate whenever they are called.
        group: the group that decides together; None for none, or for one to be found.
        listens: whether an announced collective sets the group.
        device: the device of the states, for all-reduces.
    """

    def __init__(
        self,
        units: tuple[Any, ...] = (),
        watched: tuple[nn.Module, ...] = (),
        group: ProcessGroup | None = None,
        listens: bool = False,
        device: torch.device = HOST,
    ) -> None:
        self.units, self._watched, self._listens = units, watched, listens
        self._group, self._device = group, device
        self._thread = 0

    @property
    def synchronised(self) -> bool:
        """Return whether decisions are those of a group of processes."""
        return self._group is not None

    @property
    def rank(self) -> int:
        """Return the number of this process in its group; 0 without a group."""
        return 0 if self._group is None else dist.get_rank(self._group)

    def with_group(self, sync_stop: SyncStop) -> Peers:
        """Return the peers for another solve with the same `f`; None keeps the group."""
        if sync_stop is None or self is ALONE:
            return self
        group = _named_group(sync_stop)
        return Peers(self.units, self._watched, group, False, self._device)

    def forward(self) -> AbstractContextManager[None]:
        """Return a block for the evaluations of a forward pass.

        Units stay gathered, and the collectives of `f` are noticed.
        """
        return nullcontext() if self is ALONE else self._forward()

    @contextmanager
    def _forward(self) -> Iterator[None]:
        self._thread = get_ident()
        with ExitStack() as stack:
            if self._listens:
                for module in self._watched:
                    stack.enter_context(_hook(module, self._notice_call))
            stack.enter_context(listening(self))
            stack.enter_context(gathered(self.units, "by_setting"))
            yield

    def backward(self) -> AbstractContextManager[None]:
        """Return a block for the products of a backward solve, in which units stay gathered.

        They remain so: the backward pass goes on through `f` and scatters them.
        """
        return gathered(self.units, "never") if self.units else nullcontext()

    def notice(self, group: ProcessGroup | None) -> None:
        """Learn of a collective that `f` calls; None is the group of all processes."""
        group = dist.group.WORLD if group is None else group
        if not self._listens or group is None or dist.get_world_size(group) == 1:
            return
        if self._group is not None and self._group is not group:
            raise RuntimeError(
                "f calls collectives of several process groups, so it is not clear which processes "
                "must stop together: pass sync_stop=group with a group that contains all of them"
            )
        self._group = group

    def _notice_call(self, module: nn.Module, inputs: Any) -> None:
        """Learn of a call of a module that communicates, if it is a call of this thread."""
        if get_ident() == self._thread:
            announce(getattr(module, "process_group", None))

    def any(self, flag: bool) -> bool:
        """Return whether a flag is set in any process."""
        return flag if self._group is None else self.largest([float(flag)])[0] > 0

    def largest(self, values: Sequence[float]) -> list[float]:
        """Return the largest of each value over all processes."""
        if self._group is None:
            return list(values)
        t = torch.tensor(values, dtype=small_dtype(self._device), device=self._device)
        result: list[float] = self._reduce(t, dist.ReduceOp.MAX).tolist()
        return result

    def have_same(self, t: Tensor) -> bool:
        """Return whether all processes have the same tensor, up to rounding, by its norm and sum.

        They have in tensor parallelism, where each process computes a part of the same samples.
        """
        values = [float(len(t)), float(torch.linalg.vector_norm(t)), float(t.sum())]
        extremes = self.largest([*values, *(-value for value in values)])
        size = max(1e-300, extremes[1])
        pairs = zip(extremes[:3], extremes[3:], strict=True)  # the largest, and minus the smallest
        return all(abs(largest + minus) <= 1e-6 * size for largest, minus in pairs)

    def total(self, t: Tensor) -> Tensor:
        """Return the sum over all processes of a tensor that has the same shape in each."""
        if self._group is None:
            return t
        wide = t.to(self._device, small_dtype(self._device), copy=True)
        return self._reduce(wide, dist.ReduceOp.SUM).to(t)

    def norm(self, rows: Tensor, keepdim: bool = False) -> Tensor:
        """Return the norms of rows that continue in the other processes."""
        return self.joint_norm(row_norm(rows, keepdim))

    def joint_norm(self, norms: Tensor) -> Tensor:
        """Return the norms of vectors from the norms of the parts in this process."""
        if self._group is None:
            return norms
        wide = norms.to(small_dtype(self._device))
        return self.total(wide.square()).sqrt().to(norms)

    def _reduce(self, t: Tensor, op: Any) -> Tensor:
        """Reduce a tensor over all processes, in place."""
        announce(self._group)  # a solve around this one must evaluate it in all processes, too
        try:
            dist.all_reduce(t, op=op, group=self._group)
        except RuntimeError as error:
            raise RuntimeError(
                "the processes of a solve could not agree when to stop: another process has ended, "
                "or has not answered within the time-out of the process group, because it "
                f"evaluates f another number of times ({error})"
            ) from error
        return t


#: The peers of a process on its own.
ALONE = Peers()


def find_peers(f: Any, sync_stop: SyncStop, device: torch.device) -> Peers:
    """Return the processes that take part in the solves of `f`.

    Args:
        f: the map; its modules are searched for shards and collectives.
        sync_stop: the group that decides together, see `StopRule`.
        device: the device of the states.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return ALONE
    modules = reachable_modules(f).values()
    watched = tuple(m for m in modules if _communicates(m))
    group = _named_group(sync_stop)
    return Peers(units_inside(modules), watched, group, sync_stop is None, device)


def check_sync_stop(value: Any) -> None:
    """Raise `TypeError` unless a value names the processes that stop together."""
    if value is None or isinstance(value, bool) or value == "world":
        return
    if not (dist.is_available() and isinstance(value, ProcessGroup)):
        raise TypeError(
            'sync_stop must be None, True, False, "world" or a process group, got '
            f"{value!r}; for a device mesh pass mesh.get_group()"
        )


def parse_sync_stop(value: Any) -> SyncStop:
    """Return what an option or a flag says about `sync_stop`; raise `ValueError` if it is wrong."""
    if isinstance(value, str) and value.lower() in _WORDS:
        return _WORDS[value.lower()]
    try:
        check_sync_stop(value)
    except TypeError as error:
        expected = "auto, world, false or a process group"
        raise ValueError(f"expected {expected}, got {value!r}") from error
    named: SyncStop = value
    return named


def _named_group(sync_stop: SyncStop) -> ProcessGroup | None:
    """Return the group that a program has named; None without a name or a second process."""
    if sync_stop is None or sync_stop is False:
        return None
    group = sync_stop if isinstance(sync_stop, ProcessGroup) else dist.group.WORLD
    if dist.get_rank(group) < 0:
        raise ValueError(
            "sync_stop names a process group that does not contain this process: pass the group of "
            "the processes that evaluate f together"
        )
    return None if dist.get_world_size(group) == 1 else group


def _communicates(module: nn.Module) -> bool:
    """Return whether every call of a module is a collective, whatever the module contains."""
    if isinstance(module, nn.SyncBatchNorm):
        return normalises_over_batch(module)
    if isinstance(module, DistributedDataParallel):  # it sends the buffers of the first process
        return bool(module.broadcast_buffers) and any(True for _ in module.buffers())
    return False


@contextmanager
def _hook(module: nn.Module, hook: Any) -> Iterator[None]:
    """Return a block in which a function is called before every call of a module."""
    handle = module.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()
