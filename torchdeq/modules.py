"""The tensors of the modules that a callable reaches, as they are now.

A call made in the backward pass must see the modules of the forward pass. By then
`functional_call` has put other parameters back, the next forward pass may have reset norms and
masks, and running statistics have been updated once already.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from torchdeq._torch import normalises_over_batch
from torchdeq.reach import reachable_modules, reachable_parameters, scripted

__all__ = ["ModuleState", "mixes_samples", "reachable_parameters", "scripted"]

_INNER = set(vars(nn.Module())) - {"training"}  # dicts that every module keeps for itself
_NOTHING = object()


class _Slot(NamedTuple):
    """A place in a module and what a block should see there."""

    entries: dict[str, Any]
    name: str
    value: Any

    @property
    def key(self) -> tuple[int, str]:
        return id(self.entries), self.name

    @property
    def current(self) -> Any:
        return self.entries.get(self.name, _NOTHING)

    def fill(self, value: Any) -> None:
        if value is _NOTHING:
            self.entries.pop(self.name, None)
        else:
            self.entries[self.name] = value


class ModuleState:
    """A snapshot of every module that `f` reaches: parameters, buffers, mode, own tensors.

    Tensors that a module keeps as plain attributes count too, alone or in a dict: normalised
    weights, dropout masks, an input that `forward` has left there. The entries of scripted modules
    cannot be exchanged: they stay as they are, except that statistics they update in a block are
    put back.
    """

    def __init__(self, f: Any) -> None:
        self._parameters: list[_Slot] = []
        self._others: list[_Slot] = []
        self._statistics: list[_Slot] = []
        self._scripted: list[Tensor] = []
        for part in reachable_modules(f).values():
            if isinstance(part, torch.jit.ScriptModule):
                if part.training:
                    self._scripted += part.buffers(recurse=False)
                continue
            own = vars(part)
            self._parameters += _slots(part._parameters)
            self._others += _slots(part._buffers)
            self._others += [_Slot(own, k, v) for k, v in own.items() if _belongs(k, v)]
            if getattr(part, "track_running_stats", False) and part.training:
                self._statistics += _slots(part._buffers)

    @contextmanager
    def restored(
        self,
        statistics: Literal["copied", "none"],
        detached: bool = False,
        replaced: dict[int, Tensor] | None = None,
    ) -> Iterator[None]:
        """Return a block that sees the snapshot.

        What differs from the snapshot is exchanged in the modules themselves, for every thread. Two
        threads may be in such blocks at once: each place gets back what it had when the last of
        them ends. But a thread that uses a module while another one is in a block sees what that
        block sees. So two threads may train one module at once if nothing is exchanged: first-order
        gradients of a plain `f`, and `higher_order` ones of modules without batch statistics whose
        masks and norms stay as they are. All other backward passes that evaluate `f` again
        (`higher_order`, `mem_gc`, a compiled `f`) belong to one thread at a time.

        Args:
            statistics: what normalisation layers in training do with their running statistics, on
                which their values do not depend: update a copy, or have none. The last is what
                function transforms need, which cannot write into a tensor.
            detached: parameters require no gradient.
            replaced: other tensors for those with these identities.
        """
        parameters = self._parameters
        if detached:
            parameters = [s._replace(value=s.value.detach()) for s in parameters]
        copied = statistics == "copied"
        ours = [s._replace(value=s.value.clone() if copied else None) for s in self._statistics]
        before = [(t, t.clone()) for t in self._scripted]
        token = _exchange(_with(replaced, (*parameters, *self._others)), ours)
        try:
            yield
        finally:
            _put_back(token)
            with torch.no_grad():
                for t, value in before:  # all of them: batch_norm's writing is not counted
                    t.copy_(value)

    @contextmanager
    def exchanged(self, replaced: dict[int, Tensor]) -> Iterator[None]:
        """Return a block that sees other tensors in modules, which otherwise stay as they are."""
        slots = (*self._parameters, *self._others)
        token = _exchange(_with(replaced, tuple(s for s in slots if id(s.value) in replaced)), [])
        try:
            yield
        finally:
            _put_back(token)


def _with(replaced: dict[int, Tensor] | None, slots: tuple[_Slot, ...]) -> tuple[_Slot, ...]:
    if not replaced:
        return slots
    return tuple(s._replace(value=replaced.get(id(s.value), s.value)) for s in slots)


class _Layers(NamedTuple):
    """What the blocks that are open have put into one place, the latest last."""

    slot: _Slot  # with what was there before all of them
    values: dict[int, Any]  # by block


class _Block(NamedTuple):
    number: int
    slots: list[_Slot]


_LOCK = Lock()  # only while entries are exchanged, never while a block runs: blocks nest
_OPEN: dict[tuple[int, str], _Layers] = {}
_last_block = 0


def _exchange(snapshot: tuple[_Slot, ...], statistics: list[_Slot]) -> _Block:
    """Fill the places that differ from the snapshot, and those of the statistics."""
    global _last_block
    with _LOCK:
        wanted = [s for s in snapshot if s.current is not s.value or s.key in _OPEN]
        _last_block += 1
        block = _Block(_last_block, [*wanted, *statistics])
        for slot in block.slots:
            layers = _OPEN.get(slot.key)
            if layers is None:
                layers = _OPEN[slot.key] = _Layers(slot._replace(value=slot.current), {})
            layers.values[block.number] = slot.value
            slot.fill(slot.value)
    return block


def _put_back(block: _Block) -> None:
    """Leave each place to the latest block still open, or as it was before all of them."""
    with _LOCK:
        for key in {slot.key for slot in block.slots}:
            layers = _OPEN[key]
            latest = next(reversed(layers.values))
            del layers.values[block.number]
            if not layers.values:
                del _OPEN[key]
                layers.slot.fill(layers.slot.value)
            elif latest == block.number:
                layers.slot.fill(next(reversed(layers.values.values())))


def _slots(tensors: dict[str, Any]) -> list[_Slot]:
    return [_Slot(tensors, name, t) for name, t in tensors.items() if t is not None]


def _belongs(name: str, value: Any) -> bool:
    """Return whether a plain attribute of a module is part of what it computes."""
    if isinstance(value, Tensor) or name == "training":
        return True
    return type(value) is dict and name not in _INNER


def mixes_samples(f: Any) -> bool:
    """Return whether `f` is near a layer that normalises over the batch as it is.

    Asked at every forward pass, so only the callable itself, its owner, its closure and what it
    wraps are looked at; a layer that hides elsewhere is found by a product in the backward pass.
    """
    return any(normalises_over_batch(part) for module in _near(f, 3) for part in module.modules())


def _near(f: Any, depth: int) -> Iterator[nn.Module]:
    if isinstance(f, nn.Module):
        yield f
    elif depth and callable(f) and not isinstance(f, (Tensor, type)):
        cells = getattr(f, "__closure__", None) or ()
        nearby = [getattr(f, "__self__", None), getattr(f, "func", None)]
        nearby += [getattr(f, "__wrapped__", None), *(c.cell_contents for c in cells if _full(c))]
        for thing in nearby:
            yield from _near(thing, depth - 1)


def _full(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # the variable was deleted
        return False
