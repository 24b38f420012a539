"""Snapshots of the tensors of all modules that a callable reaches.

A call of `f` in the backward pass must see the tensors of the forward pass. Meanwhile
`functional_call` has restored other parameters, the next forward pass may have reset norms and
masks, and running statistics have been updated once already.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from torchdeq._torch import is_compiled, normalises_over_batch
from torchdeq.distributed.sharding import units_inside
from torchdeq.reach import reachable_modules

_INTERNAL = set(vars(nn.Module())) - {"training"}  # attributes that every module has
_ABSENT = object()


class _Slot(NamedTuple):
    """An entry in a dict of a module, and the value that it should have in a block."""

    entries: dict[str, Any]
    name: str
    value: Any

    @property
    def key(self) -> tuple[int, str]:
        return id(self.entries), self.name

    @property
    def current(self) -> Any:
        return self.entries.get(self.name, _ABSENT)

    def fill(self, value: Any) -> None:
        if value is _ABSENT:
            self.entries.pop(self.name, None)
        else:
            self.entries[self.name] = value


class ModuleState:
    """A snapshot of every module that `f` reaches: parameters, buffers, mode, other tensors.

    Other tensors are plain attributes, alone or in a dict: normalised weights, dropout masks, an
    input that `forward` has stored. The entries of scripted modules cannot be exchanged and keep
    their current tensors, but running statistics that they update in a block are restored after it.
    Units of `fully_shard` exchange their parameters themselves, before and after each call.
    """

    def __init__(self, f: Any) -> None:
        self._parameters: list[_Slot] = []
        self._others: list[_Slot] = []
        self._statistics: list[_Slot] = []
        self._scripted: list[Tensor] = []
        modules = reachable_modules(f).values()
        sharded = {id(part) for unit in units_inside(modules) for part in unit.modules()}
        for part in modules:
            if isinstance(part, torch.jit.ScriptModule):
                if part.training:
                    self._scripted += part.buffers(recurse=False)
                continue
            attributes = vars(part)
            if id(part) not in sharded:
                self._parameters += _slots(part._parameters)
            self._others += _slots(part._buffers)
            self._others += [
                _Slot(attributes, k, v) for k, v in attributes.items() if _is_state(k, v)
            ]
            if getattr(part, "track_running_stats", False) and part.training:
                self._statistics += _slots(part._buffers)

    @contextmanager
    def restored(
        self,
        statistics: Literal["copied", "none"],
        detached: bool = False,
        replaced: dict[int, Tensor] | None = None,
    ) -> Iterator[None]:
        """Return a block in which the modules have the tensors of the snapshot.

        Entries that differ from the snapshot are exchanged in the modules themselves, for every
        thread. Two threads may be in such blocks at the same time: each entry gets its original
        value back when the last block ends. But a thread that uses a module while another thread is
        in a block sees the exchanged tensors. So two threads may train one module at the same time
        only if nothing is exchanged: for first-order gradients of a plain `f`, and for
        `higher_order` gradients of modules without batch statistics whose masks and norms do not
        change. All other backward passes that evaluate `f` again (`higher_order`, `mem_gc`, a
        compiled `f`) must run in one thread at a time.

        Args:
            statistics: the running statistics of normalisation layers in training mode, which
                update them but do not use them: `"copied"` gives the layers copies to update;
                `"none"` gives them none, for function transforms, which cannot write into a tensor.
            detached: whether parameters are detached.
            replaced: tensors to use instead of others, by the `id` of the tensor to replace.
        """
        parameters = self._parameters
        if detached:
            parameters = [s._replace(value=s.value.detach()) for s in parameters]
        copied = statistics == "copied"
        copies = [s._replace(value=s.value.clone() if copied else None) for s in self._statistics]
        buffers = [(t, t.clone()) for t in self._scripted]
        block = _exchange(_with_replacements(replaced, (*parameters, *self._others)), copies)
        try:
            yield
        finally:
            _put_back(block)
            with torch.no_grad():
                for t, value in buffers:  # all: versions do not count the writes of batch_norm
                    t.copy_(value)

    @contextmanager
    def exchanged(self, replaced: dict[int, Tensor]) -> Iterator[None]:
        """Return a block in which the modules have other tensors in the place of some, by `id`."""
        slots = (s for s in (*self._parameters, *self._others) if id(s.value) in replaced)
        block = _exchange(_with_replacements(replaced, tuple(slots)), [])
        try:
            yield
        finally:
            _put_back(block)


def _with_replacements(
    replaced: dict[int, Tensor] | None, slots: tuple[_Slot, ...]
) -> tuple[_Slot, ...]:
    """Return the slots with replaced values, by `id`."""
    if not replaced:
        return slots
    return tuple(s._replace(value=replaced.get(id(s.value), s.value)) for s in slots)


class _Stack(NamedTuple):
    """The values that the open blocks have put into one entry, the latest block last."""

    slot: _Slot  # with the original value
    values: dict[int, Any]  # by the number of the block


class _Block(NamedTuple):
    """An open block, with the entries that it has exchanged."""

    number: int
    slots: list[_Slot]


_LOCK = Lock()  # taken while entries are exchanged, not while a block runs: blocks nest
_OPEN: dict[tuple[int, str], _Stack] = {}
_last_block = 0


def _exchange(snapshot: tuple[_Slot, ...], statistics: list[_Slot]) -> _Block:
    """Open a block: set the entries that differ from the snapshot, and those in `statistics`."""
    global _last_block
    with _LOCK:
        changed = [s for s in snapshot if s.current is not s.value or s.key in _OPEN]
        _last_block += 1
        block = _Block(_last_block, [*changed, *statistics])
        for slot in block.slots:
            stack = _OPEN.get(slot.key)
            if stack is None:
                stack = _OPEN[slot.key] = _Stack(slot._replace(value=slot.current), {})
            stack.values[block.number] = slot.value
            slot.fill(slot.value)
    return block


def _put_back(block: _Block) -> None:
    """Close a block: give each entry the value of the latest open block, or its original value."""
    with _LOCK:
        for key in {slot.key for slot in block.slots}:
            stack = _OPEN[key]
            latest = next(reversed(stack.values))
            del stack.values[block.number]
            if not stack.values:
                del _OPEN[key]
                stack.slot.fill(stack.slot.value)
            elif latest == block.number:
                stack.slot.fill(next(reversed(stack.values.values())))


def _slots(tensors: dict[str, Any]) -> list[_Slot]:
    """Return a slot for each entry that is not None, with its current tensor."""
    return [_Slot(tensors, name, t) for name, t in tensors.items() if t is not None]


def _is_state(name: str, value: Any) -> bool:
    """Return whether a plain attribute of a module can influence its result."""
    if isinstance(value, Tensor) or name == "training":
        return True
    return type(value) is dict and name not in _INTERNAL


def mixes_samples(f: Any) -> bool:
    """Return whether `f` uses a layer that normalises over the batch.

    Every forward pass asks this, so the search covers only the callable itself, its owner, its
    closure and the function that it wraps. A product in the backward pass detects other layers.
    """
    modules = (part for part in _direct_parts(f, 3) if isinstance(part, nn.Module))
    return any(normalises_over_batch(part) for module in modules for part in module.modules())


def uses_compiler(f: Any) -> bool:
    """Return whether `f` uses a compiled function or module, by the search of `mixes_samples`.

    The answer only saves time: a compiled part that the search misses gives the same gradients.
    """
    return any(
        is_compiled(inner)
        for part in _direct_parts(f, 3)
        for inner in (part.modules() if isinstance(part, nn.Module) else (part,))
    )


def _direct_parts(f: Any, depth: int) -> Iterator[Any]:
    """Yield the callables that `f` reaches in at most `depth` steps, without looking into modules.

    They include `f` itself.
    """
    if isinstance(f, nn.Module):
        yield f
    elif depth and callable(f) and not isinstance(f, (Tensor, type)):
        yield f
        cells = getattr(f, "__closure__", None) or ()
        parts = [getattr(f, "__self__", None), getattr(f, "func", None)]
        parts += [getattr(f, "__wrapped__", None), *(c.cell_contents for c in cells if _is_set(c))]
        for part in parts:
            yield from _direct_parts(part, depth - 1)


def _is_set(cell: Any) -> bool:
    """Return whether a variable of a closure has a value."""
    try:
        return cell.cell_contents is not None
    except ValueError:  # the variable was deleted
        return False
