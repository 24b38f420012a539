"""The modules that a callable reaches, and their tensors as they are now.

A call made in the backward pass must see the modules of the forward pass: ``functional_call`` has
put other parameters back by then, and running statistics have been updated once already.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

_DEPTH = 4  # how deep closures, bound methods and partials are searched


class _Slot(NamedTuple):
    """A place in a module and what a block should see there."""

    tensors: dict[str, Any]
    name: str
    value: Tensor | None

    @property
    def found(self) -> _Slot:
        """The same place with what is there now."""
        return self._replace(value=self.tensors.get(self.name))

    def fill(self) -> None:
        self.tensors[self.name] = self.value


class ModuleState:
    """A snapshot of the parameters and buffers of every module that ``f`` reaches."""

    def __init__(self, f: Any) -> None:
        self._parameters: list[_Slot] = []
        self._buffers: list[_Slot] = []
        self._statistics: list[_Slot] = []
        for module in _reachable(f, _DEPTH, set()):
            for part in module.modules():
                self._parameters += _slots(part._parameters)
                buffers = _slots(part._buffers)
                self._buffers += buffers
                if getattr(part, "track_running_stats", False) and part.training:
                    self._statistics += buffers

    @contextmanager
    def restored(
        self, statistics: Literal["kept", "copied", "none"], detached: bool = False
    ) -> Iterator[None]:
        """A block that sees the snapshot.

        Args:
            statistics: what normalisation layers in training do with their running statistics, on
                which their values do not depend: update them, update a copy, or have none. The last
                is what function transforms need, which cannot write into a tensor.
            detached: parameters require no gradient.
        """
        parameters = self._parameters
        if detached:
            parameters = [s._replace(value=_detached(s.value)) for s in parameters]
        wanted = [s for s in (*parameters, *self._buffers) if s.found.value is not s.value]
        if statistics == "copied":
            wanted += [s._replace(value=_copied(s.value)) for s in self._statistics]
        elif statistics == "none":
            wanted += [s._replace(value=None) for s in self._statistics]
        found = [slot.found for slot in wanted]
        try:
            for slot in wanted:
                slot.fill()
            yield
        finally:
            for slot in reversed(found):
                slot.fill()


def _slots(tensors: dict[str, Any]) -> list[_Slot]:
    return [_Slot(tensors, name, t) for name, t in tensors.items() if t is not None]


def _detached(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.detach()


def _copied(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.clone()


def _reachable(f: Any, depth: int, seen: set[int]) -> list[nn.Module]:
    """Modules near a callable: itself, its owner, arguments of a partial, cells."""
    if id(f) in seen or depth < 0:
        return []
    seen.add(id(f))
    if isinstance(f, nn.Module):
        return [f]
    nearby = [getattr(f, "__self__", None), getattr(f, "func", None), *getattr(f, "args", ())]
    nearby += [getattr(f, "__wrapped__", None), *(getattr(f, "keywords", None) or {}).values()]
    nearby += [cell.cell_contents for cell in getattr(f, "__closure__", None) or () if _full(cell)]
    found = []
    for thing in nearby:
        for item in thing if isinstance(thing, (list, tuple)) else [thing]:
            if callable(item) and not isinstance(item, (Tensor, type)):
                found += _reachable(item, depth - 1, seen)
    return found


def _full(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # the variable was deleted
        return False
