"""Counts of operations: launches, allocations, transfers, and the bytes that launches touch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

#: Operations whose result the host waits for.
READS = {"_local_scalar_dense", "is_nonzero", "nonzero", "equal"}
#: Operations that only allocate.
_EMPTY = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
#: Operations that overwrite their first argument without reading it.
_OVERWRITES = {"copy_", "fill_", "zero_"}
#: Operations that touch as many entries of their first argument as they return or receive.
_PARTIAL = {"index_select", "gather", "index", "index_copy_", "index_put_", "scatter_"}


@dataclass
class Tally:
    """What was asked of a device, and of the host beside it.

    A launch is an operation that is neither a view nor a mere allocation; on a GPU it is at least
    one kernel. Bytes are those of the arguments and results of launches, without caches.
    """

    launches: int = 0
    host: int = 0  # operations on tensors of the host, beside a simulated device
    allocations: int = 0
    reads: int = 0  # transfers to the host, for each of which it waits
    uploads: int = 0  # transfers to the device
    read: int = 0  # bytes
    written: int = 0  # bytes
    names: Counter[str] = field(default_factory=Counter)

    def add(self, func: Any, inputs: list[Tensor], outputs: list[Tensor], launched: bool) -> None:
        """Count one operation.

        Args:
            func: the operation of the dispatcher.
            inputs: its tensor arguments.
            outputs: its tensor results.
            launched: whether it runs on the metered device, not on the host beside it.
        """
        name = func._schema.name.split("::")[1]
        if name in READS:  # on the CPU; a device counts them as transfers
            self.reads += launched
            return
        if not inputs and not outputs:
            return  # e.g. a promotion of dtypes
        written_arguments = sum(_writes(argument) for argument in func._schema.arguments)
        known = {t.untyped_storage().data_ptr() for t in inputs}
        new = [t for t in outputs if t.numel() and t.untyped_storage().data_ptr() not in known]
        if not written_arguments and outputs and not new and any(t.numel() for t in outputs):
            return  # a view
        if not launched:
            self.host += name not in _EMPTY
            return
        self.allocations += 0 if written_arguments else len(new)
        if name in _EMPTY:
            return
        self.launches += 1
        self.names[name] += 1
        self._add_bytes(name, inputs, outputs, written_arguments)

    def _add_bytes(
        self, name: str, inputs: list[Tensor], outputs: list[Tensor], written_arguments: int
    ) -> None:
        sizes = [_bytes(t) for t in inputs]
        written = sum(_bytes(t) for t in outputs)
        if name in _PARTIAL and inputs:
            moved = written if not written_arguments else sum(sizes[1:])
            self.read, self.written = self.read + moved, self.written + moved
            return
        self.written += written
        if name in _OVERWRITES:
            sizes = sizes[1:]
        elif written_arguments and not name.endswith("_"):  # out=: the last arguments
            sizes = sizes[:-written_arguments]
        self.read += sum(sizes)


def _writes(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _bytes(t: Tensor) -> int:
    """Return the bytes behind a tensor; an expanded dimension counts once."""
    count = t.element_size()
    for size, stride in zip(t.shape, t.stride(), strict=True):
        count *= size if stride or not size else 1
    return count
